"""python-redis-lock 4.0.1: one error ends the renewal for good, and the holder is not told.

    pip install -r ../python/requirements.txt && python3 python_redis_lock_renewal.py

The server is a replica for a while, as in a fail-over, so that one renewal is refused. The thread that renews ends with that error, the lock runs
out, and another has it, while `release` is the first call that tells the holder.
"""

import contextlib
import socket
import subprocess
import tempfile
import threading
import time

import redis
import redis_lock

threading.excepthook = lambda error: print(f"the thread that renews ended: {error.exc_value}")


@contextlib.contextmanager
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            ["redis-server", "--port", str(port), "--dir", folder, "--save", ""], stdout=subprocess.DEVNULL
        )
        client = redis.Redis(port=port)
        try:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.05)
            yield client
        finally:
            run.terminate()
            run.wait()


with server() as client:
    first = redis_lock.Lock(client, "k", expire=3, auto_renewal=True)
    assert first.acquire()
    client.replicaof("127.0.0.1", 1)
    time.sleep(2.5)
    client.replicaof("NO", "ONE")

    second = redis_lock.Lock(client, "k", expire=3)
    begin = time.monotonic()
    assert second.acquire()
    print(f"another has the lock after {time.monotonic() - begin:.1f} s; the first works on, untold")
    try:
        first.release()
        print("nothing wrong")
    except redis_lock.NotAcquired as error:
        print(f"the first is told at its release: {error}")
    second.release()
