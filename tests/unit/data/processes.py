"""Real processes for the arena's tests: forked, watched, killed."""

import os
import signal
import sys
import time
import traceback


def fork(work):
    """Run ``work()`` in a child; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = int(work() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid):
    """Exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_line(work, count, files):
    """Run ``work()`` in a child that kills itself before the count-th line that it executes in ``files``."""

    def traced():
        left = [count]

        def trace(frame, event, argument):
            if not frame.f_code.co_filename.endswith(files):
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work()
        sys.settrace(None)

    return wait(fork(traced))


def kill_after(work, seconds):
    """Run ``work()`` in a child and kill it so many seconds after it has begun."""
    read, write = os.pipe()

    def announced():
        os.write(write, b"!")
        return work()

    pid = fork(announced)
    os.read(read, 1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.close(read)
    os.close(write)
    return wait(pid)
