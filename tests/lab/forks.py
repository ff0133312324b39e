"""Children of one process that has everything imported: `serve` forks them there, `Forks` asks for them from a test.

A request is a line of JSON, with a file `log` for what the child prints. The answer is the child's process id; when it
has ended, `PID STATUS` follows.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import warnings

PATIENCE = 120.0


class Forks:
    """The children of a process that runs a script which serves."""

    def __init__(self, script, *arguments, environment=None):
        command = [sys.executable, str(script), *map(str, arguments)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin
        assert self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._born: queue.Queue[str] = queue.Queue()
        self.ended: dict[int, int] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._born.get(timeout=PATIENCE) == "ready"

    def _listen(self):
        for line in self._answers:
            first, *status = line.split()
            if status:
                self.ended[int(first)] = int(status[0])
            else:
                self._born.put(first)

    def start(self, **request):
        """A child, by its process id."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return int(self._born.get(timeout=PATIENCE))

    def status(self, pid, timeout=300.0):
        """The exit status of a child, once it has one; None if that takes longer."""
        end = time.monotonic() + timeout
        while pid not in self.ended:
            if time.monotonic() > end:
                return None
            time.sleep(0.002)
        return self.ended[pid]

    def wait_for(self, word, log, pid):
        """Until a child has said a word, or ended."""
        while not (log.exists() and word in log.read_text()) and pid not in self.ended:
            time.sleep(0.002)

    def close(self):
        self._requests.close()
        self._process.wait(timeout=PATIENCE)
        self._listener.join(timeout=PATIENCE)
        self._answers.close()


def serve(work):
    """Fork a child for every request, which carries it out and ends as a process of its own would."""
    warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it has run here yet
    _say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line), work)
        _say(pid)
        threading.Thread(target=_reap, args=(pid,), daemon=True).start()


def _child(request, work):
    with open(request["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = 1
    try:
        work(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print(repr(error), flush=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _say(*words):
    """A line as one piece: one child may end while the next is being announced."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _reap(pid):
    _, status = os.waitpid(pid, 0)
    _say(pid, os.waitstatus_to_exitcode(status))
