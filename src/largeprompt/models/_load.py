"""Networks, texts and attention calls from files: what cannot be read is refused in one line that says why."""

import contextlib
import io
import json
import os
import socket
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

import numpy as np

INSTALL = 'models need PyTorch and transformers; `pip install "largeprompt[models]"` installs them'


def load(model: str, *, causal: bool = False) -> tuple[Any, Any]:
    """A transformers model in float32 and its tokenizer, or None where there is none that transformers knows.

    `model` is a folder, a GGUF file or a name on the model hub; with `causal`, it must predict the next token, and
    comes with the head that does so. No code that comes with a model is run.
    """
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # where bars go that cannot be turned off
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError(f"{model}: {INSTALL} ({error})") from None
        place, options = _place(model)
        options |= {"trust_remote_code": False}
        config = _read(model, transformers.AutoConfig, place, **options)
        if config.is_encoder_decoder:
            raise ValueError(
                f"{model} is an encoder-decoder ({config.model_type}); give a model with one stack of layers, or "
                "inspect its encoder in Python with largeprompt.models.inspect"
            )
        own = {"dtype": torch.float32, "weights_only": True, "output_loading_info": True}
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        network, found = _read(model, kind, place, **options, **own)
        _check(model, network, found["missing_keys"])
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
        except Exception:  # of any kind: each kind of tokenizer has its own way to fail
            tokenizer = None
    return network.eval(), tokenizer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers, and no warnings of libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.utils import logging
        except ImportError:
            yield
            return
        before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        hub = getLogger("huggingface_hub")
        level = hub.level
        hub.setLevel(CRITICAL)
        logging.set_verbosity(CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            hub.setLevel(level)
            logging.set_verbosity(before)
            if bars:
                logging.enable_progress_bar()


def _place(model: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds it, and what it needs to know for that."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{model} has no config.json; a folder must hold a transformers model, or arrays as .npy files"
            )
        try:
            json.loads((path / "config.json").read_text("utf-8"))
        except ValueError:
            raise ValueError(
                f"{path / 'config.json'} is not JSON; a transformers model has its settings there"
            ) from None
        return str(path), {}
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{model} is no GGUF file: it does not begin with GGUF")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        known = "a folder with config.json, FILE.gguf, FILE.npz or FILE.safetensors"
        raise ValueError(f"{model} is not a model that can be read; give {known}")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"{model}: there is no such folder or file")
    return model, {"local_files_only": not _hub_in_reach()}


def _hub_in_reach() -> bool:
    """Whether the name of the hub is known: without a network it would be tried for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _read(model: str, kind: Any, place: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(place, **options)
    except Exception as error:  # of any kind: damaged files raise whatever the reader met
        raise ValueError(f"{model}: {_reason(model, place, error)}") from None


def _reason(model: str, place: str, error: Exception) -> str:
    """Why a model was not read, and what would be right."""
    said = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in said:
        return "it needs code that comes with it, which is never run; give a model that transformers itself has"
    if "for this kind of AutoModel" in said:
        return "it is of a kind that has no language-model head; give a model that predicts the next token"
    if "does not recognize this architecture" in said or "Unrecognized model" in said or "not supported yet" in said:
        return f"its architecture is not one that this version of transformers knows: {said[:160]}"
    if isinstance(error, ImportError):
        return f"{said[:160]}; {INSTALL}"
    if not Path(place).exists():
        return (
            "it is no folder or file here, and no model of this name could be fetched from the hub; is there a network?"
        )
    return f"it could not be read, it may be damaged or not complete ({type(error).__name__}: {said[:160]})"


def _check(model: str, network: Any, missing: Any) -> None:
    """Refuse a network whose weights are not there, or are no numbers."""
    import torch

    names = [name for name, _ in network.named_parameters()]
    absent = [name for name in names if name in set(missing)]
    if 2 * len(absent) > len(names):
        raise ValueError(f"{model} has no weights for {len(absent)} of {len(names)} parameters, such as {absent[0]}")
    head = [name for name in absent if not name.startswith(f"{network.base_model_prefix}.")]
    if head and network.base_model is not network:
        raise ValueError(
            f"{model} has no language-model head (no weights for {head[0]}); give a model that predicts the next token"
        )
    for name, values in network.named_parameters():
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{model}: the weight {name} is not finite everywhere; inspect a model whose weights are")


def prompt(
    model: str, tokenizer: Any, source: str | np.ndarray, length: int, part: int = 0, *, asked: str | None = None
) -> tuple[np.ndarray, list[str] | None]:
    """Ids and words of `length` tokens of a text, or of ids themselves; `asked` is how a user asked for so many."""
    asked = asked or f"--length {length}"
    if isinstance(source, str):
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer that transformers knows; give token ids in FILE.npy")
        return _encode(tokenizer, source, length, part, asked)
    if len(source) < (part + 1) * length:
        raise ValueError(f"there are {len(source)} tokens; {asked} needs {(part + 1) * length}")
    return source[part * length : (part + 1) * length], None


def _encode(tokenizer: Any, text: str, length: int, part: int, asked: str) -> tuple[np.ndarray, list[str]]:
    """Ids and words of this part of a text, between the tokenizer's special tokens."""
    with quiet():
        before, after = _special(tokenizer)
        body = length - len(before) - len(after)
        if body < 1:
            raise ValueError(f"{asked} is too short; this tokenizer needs at least {length - body + 1} tokens")
        wanted = (part + 1) * body
        for characters in (32 * wanted, len(text)):  # a long text is not read to its end
            ids = tokenizer(text[:characters], add_special_tokens=False)["input_ids"]
            if len(ids) > wanted + 8:
                break
        if len(ids) < wanted:
            need = f"{part + 1} × {body}" if part else f"{body}"
            raise ValueError(
                f"the text has {len(ids)} tokens; {asked} needs {need}, so give a longer text "
                f"or ask for at most {len(ids) // (part + 1) + length - body}"
            )
        chosen = [*before, *ids[part * body : wanted], *after]
        pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(chosen)]
        words = [str(tokenizer.decode([each])) for each in chosen]
    words = [
        f" {word}" if piece.startswith("▁") and word[:1] != " " else word
        for piece, word in zip(pieces, words, strict=True)
    ]
    if not any(word.startswith(" ") for word in words):  # pieces that stand for words, with a sign where one goes on
        words = [piece.removeprefix("##") if piece.startswith("##") else f" {piece}" for piece in pieces]
    return np.array(chosen), words


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text and after it."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return whole[:i], whole[i + len(plain) :]
    return [], []


def check_tokens(model: str, network: Any, ids: np.ndarray, asked: str | None = None) -> None:
    """Refuse tokens that a network has no embedding for, or more than it has positions; `asked` as for `prompt`."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < 2:
        raise ValueError(
            f"tokens have shape {ids.shape} and type {ids.dtype}; they must be whole numbers, one after another"
        )
    config = getattr(network, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and len(ids) > most > 0:
        raise ValueError(
            f"{asked or f'--length {len(ids)}'} asks for {len(ids)} tokens; {model} has positions for {most}"
        )
    try:
        size = network.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        said = f"{model} reads no token ids: it is a {type(network).__name__}"
        raise ValueError(f"{said}; inspect it in Python with largeprompt.models.inspect") from None
    if ids.min() < 0 or ids.max() >= size:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"a token is {worst}; {model} has tokens 0 to {size - 1}")


def read_text(path: Path) -> str:
    """A text file in UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#x}") from None


def read_tokens(path: Path) -> np.ndarray:
    """Token ids from a .npy file."""
    return np.atleast_1d(np.squeeze(read_array(path, lambda: np.load(path, allow_pickle=False))))


def read_array(path: Path, read: Callable[[], Any]) -> Any:
    """What a reader makes of a file; one that is not what its name says is refused in a line."""
    try:
        return read()
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # of any kind: damaged files raise whatever the reader met
        said = " ".join(str(error).split())[:160]
        raise ValueError(f"{path} cannot be read as {path.suffix}: {said or type(error).__name__}") from None
