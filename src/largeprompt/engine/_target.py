"""What differs between a processor and a GPU in the code that both compile.

On a processor a *row* is one number of each of `LANES` prompts, and one thread does all of a step. On a GPU a thread
has rows of one prompt alone, in its registers, and the threads of a block share what concerns them all. Sources written
with the functions of this module mean both. Without a compiler (`NUMBA_DISABLE_JIT`) they are plain Python that means
the GPU, for Numba's simulator of one.
"""

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

LANES = 64  # prompts whose numbers lie side by side on a processor
PLAIN_PYTHON = bool(config.DISABLE_JIT)  # pyrefly: ignore[missing-attribute]
_WORD, _WIDE, _REAL = ir.IntType(32), ir.IntType(64), ir.FloatType()
WARP = 4 if PLAIN_PYTHON else 32  # threads of a GPU that go together; simulated ones are costly


def on_gpu(context) -> bool:
    return type(context).__name__ == "CUDATargetContext"


def call(builder, name: str, result, arguments=()):
    """A call of LLVM's function of that name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), arguments)


def broadcast(builder, value, width: int):
    """A vector of so many equal numbers."""
    zeros = ir.Constant(ir.VectorType(_WORD, width), None)
    one = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, ir.Constant(_WORD, 0)
    )
    return builder.shuffle_vector(one, one, zeros)


def _as_bits(context, x):
    """The bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _WORD)

    return types.uint32(types.float32), generate


def _from_bits(context, bits):
    """The float32 of given bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _REAL)

    return types.float32(types.uint32), generate


def _product_over_lanes(context, a, first, b, second):
    """Σ a b over `LANES` entries of two float32 arrays, from `first` and `second` on, on a processor.

    By vectors, so that the order of the sum is no choice of the compiler's: sixteen sums from the last quarter to the
    first, each product rounded with its sum, and then halves of them. A compiler left to choose does so differently in
    the process that compiles a loop and in one that loads it, and runs would end at other bits.
    """

    def generate(context, builder, signature, arguments):
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[::2], arguments[::2], strict=True)
        ]

        def parts(quarter: int):
            for array, start in zip(arrays, arguments[1::2], strict=True):
                place = builder.gep(array.data, [builder.add(start, ir.Constant(start.type, 16 * quarter))])
                yield builder.load(builder.bitcast(place, ir.VectorType(_REAL, 16).as_pointer()), align=4)

        total = builder.fmul(*parts(3))
        for quarter in (2, 1, 0):
            total = call(builder, "llvm.fma.v16f32", total.type, [*parts(quarter), total])
        for half in (8, 4, 2, 1):
            places = (ir.Constant(ir.VectorType(_WORD, half), list(range(at, at + half))) for at in (0, half))
            total = builder.fadd(*(builder.shuffle_vector(total, total, place) for place in places))
        return builder.extract_element(total, ir.Constant(_WORD, 0))

    return types.float32(a, types.intp, b, types.intp), generate


def _wide_product(context, a, b):
    """The high and the low half of the product of two words of 32 bits."""

    def generate(context, builder, signature, arguments):
        product = builder.mul(*(builder.zext(argument, _WIDE) for argument in arguments))
        halves = builder.trunc(builder.lshr(product, ir.Constant(_WIDE, 32)), _WORD), builder.trunc(product, _WORD)
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint32, 2)(types.uint32, types.uint32), generate


def _xor(context, a, b, c):
    """The exclusive or of three words of 32 bits, as one such word; Numba's own operator would make 64 bits of them."""

    def generate(context, builder, signature, arguments):
        return builder.xor(builder.xor(arguments[0], arguments[1]), arguments[2])

    return types.uint32(types.uint32, types.uint32, types.uint32), generate


def _wrapped_sum(context, a, b):
    """The sum of two words of 32 bits, less 2^32 where it is as large, without words of 64 bits in between."""

    def generate(context, builder, signature, arguments):
        return builder.add(*arguments)

    return types.uint32(types.uint32, types.uint32), generate


def _tuned(context):
    """Ask for what makes the function that calls this fast.

    On a processor the machine's widest vectors, which LLVM halves by default; on a GPU to be made part of its caller,
    so that the arrays of a thread can live in its registers.
    """

    def generate(context, builder, signature, arguments):
        asked = "alwaysinline" if on_gpu(context) else '"prefer-vector-width"="512"'
        set.add(builder.function.attributes, asked)
        return context.get_dummy_value()

    return types.none(), generate


def _lanes(context):
    """How many prompts the rows of a thread hold."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.intp, 1 if on_gpu(context) else LANES)

    return types.intp(), generate


def _row(context, r, j):
    """Where lane j of row r is; unsigned, or else an index could count from the end and nothing would vectorise."""

    def generate(context, builder, signature, arguments):
        r, j = arguments
        if not on_gpu(context):
            r = builder.mul(r, ir.Constant(r.type, LANES))
        return builder.add(r, j, flags=("nsw",) if on_gpu(context) else ())

    return types.uintp(types.intp, types.intp), generate


def _shared(context):
    """Whether threads share a step."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.boolean, on_gpu(context))

    return types.boolean(), generate


def _shared_out(constant: int, kind: Any = types.intp):
    """What says how the threads of a GPU share something out; a processor's one thread has a constant."""

    def function(context, number):
        def generate(context, builder, signature, arguments):
            return arguments[0] if on_gpu(context) else context.get_constant(kind, constant)

        return kind(kind), generate

    return function


def _hardware(name: str):
    """A function of a float32 that a GPU has an instruction for; on a processor it must not be called."""

    def function(context, x):
        def generate(context, builder, signature, arguments):
            if not on_gpu(context):
                return arguments[0]
            return call(builder, f"llvm.nvvm.{name}.approx.ftz.f", _REAL, arguments)

        return types.float32(types.float32), generate

    function.__name__ = name
    return function


def _register(name: str):
    """A register of a GPU that says which thread this is, or how many there are."""

    def function(context):
        def generate(context, builder, signature, arguments):
            return builder.zext(call(builder, f"llvm.nvvm.read.ptx.sreg.{name}", _WORD), _WIDE)

        return types.intp(), generate

    return function


def _clock(name: str):
    """A clock of a GPU, by an instruction with side effects: of two plain reads a compiler keeps one."""

    def function(context):
        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(_WIDE, [])
            return builder.call(ir.InlineAsm(kind, f"mov.u64 $0, {name};", "=l", side_effect=True), [])

        return types.int64(), generate

    return function


def _place(context, builder, kind, array, index):
    """The address of an entry of an array."""
    return builder.ptrtoint(builder.gep(context.make_array(kind)(context, builder, array).data, [index]), _WIDE)


def _put_marked(context, array, index, x, mark):
    """Write a float32 and a mark of 32 bits as one word, which another block reads whole."""

    def generate(context, builder, signature, arguments):
        array, index, x, mark = arguments
        high = builder.shl(builder.zext(builder.trunc(mark, _WORD), _WIDE), ir.Constant(_WIDE, 32))
        word = builder.or_(high, builder.zext(builder.bitcast(x, _WORD), _WIDE))
        code = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), [_WIDE, _WIDE]),
            "st.relaxed.gpu.global.u64 [$0], $1;",
            "l,l",
            side_effect=True,
        )
        builder.call(code, [_place(context, builder, signature.args[0], array, index), word])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.float32, types.int64), generate


def _fresh(context, array, index):
    """A word that another block may have just written, read past what a multiprocessor keeps to itself."""

    def generate(context, builder, signature, arguments):
        code = ir.InlineAsm(
            ir.FunctionType(_WIDE, [_WIDE]), "ld.relaxed.gpu.global.u64 $0, [$1];", "=l,l", side_effect=True
        )
        return builder.call(code, [_place(context, builder, signature.args[0], *arguments)])

    return types.int64(array, types.intp), generate


def _number_in(context, word):
    """The float32 of such a word."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], _WORD), _REAL)

    return types.float32(types.int64), generate


def _mark_in(context, word):
    """The mark of such a word."""

    def generate(context, builder, signature, arguments):
        return builder.lshr(arguments[0], ir.Constant(_WIDE, 32))

    return types.int64(types.int64), generate


def _together(context):
    """Wait until all threads that share a step have come here, and see what they wrote."""

    def generate(context, builder, signature, arguments):
        call(builder, "llvm.nvvm.barrier0", ir.VoidType())
        return context.get_dummy_value()

    return types.none(), generate


def _all_agree(context, flag):
    """Whether it holds for every thread that shares a step, once all of them have come here."""

    def generate(context, builder, signature, arguments):
        held = call(builder, "llvm.nvvm.barrier0.and", _WORD, [builder.zext(arguments[0], _WORD)])
        return builder.icmp_unsigned("!=", held, ir.Constant(_WORD, 0))

    return types.boolean(types.boolean), generate


def either(generator: Any, plain: Any) -> Any:
    """A function that compilers generate, or what stands for it in plain Python."""
    return plain if PLAIN_PYTHON else intrinsic(generator)


def _plain_product(a, b):
    product = int(a) * int(b)
    return np.uint32(product >> 32), np.uint32(product & 0xFFFFFFFF)


_thread: Any = threading.current_thread  # the simulator's threads know their place
as_bits = either(_as_bits, lambda x: np.float32(x).view(np.uint32))
from_bits = either(_from_bits, lambda bits: np.uint32(bits).view(np.float32))
wide_product = either(_wide_product, _plain_product)
xor = either(_xor, lambda a, b, c: a ^ b ^ c)
wrapped_sum = either(_wrapped_sum, lambda a, b: np.uint32((int(a) + int(b)) & 0xFFFFFFFF))
product_over_lanes = either(_product_over_lanes, None)
tuned = either(_tuned, lambda: None)
lanes = either(_lanes, lambda: 1)
row = either(_row, lambda r, j: np.uintp(r + j))
shared = either(_shared, lambda: True)
has_instructions = either(_shared, lambda: False)  # whether there are the four that follow
ex2, lg2, sine, cosine = (either(_hardware(name), None) for name in ("ex2", "lg2", "sin", "cos"))
member = either(_register("tid.x"), lambda: _thread().threadIdx.x)  # which thread of a block this is
members = either(_register("ntid.x"), lambda: _thread()._manager._block_dim[0])  # how many there are
mate = either(_shared_out(0), lambda own: own)  # which of those that share a layer
mates = either(_shared_out(1), lambda number: number)  # how many they are
alone = either(_shared_out(False, types.boolean), lambda single: single)  # whether each has one entry at most
across = either(_shared_out(1), lambda width: width)  # how many of them go along the columns of a matrix
# of blocks that run side by side, as simulated ones do not
put_marked, fresh, number_in, mark_in = (
    either(function, None) for function in (_put_marked, _fresh, _number_in, _mark_in)
)
together = either(_together, lambda: _thread().syncthreads())
all_agree = either(_all_agree, lambda flag: _thread().syncthreads_and(flag))
cycles = either(_clock("%clock64"), lambda: 0)  # of the multiprocessor that a thread runs on
nanoseconds = either(_clock("%globaltimer"), lambda: 0)  # of the whole GPU; slower to read
