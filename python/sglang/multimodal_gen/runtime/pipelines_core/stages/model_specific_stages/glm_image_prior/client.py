# SPDX-License-Identifier: Apache-2.0
"""The asynchronous client of an AR server, on an event loop in a thread of its own."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig, PriorError
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

from .metrics import PriorMetrics
from .retry import AttemptFailure, Kind, delay_s, kind_of_status
from .watch import ServerWatch

logger = init_logger(__name__)

Answer = TypeVar("Answer")

# SRT closes an idle connection after 5 s; one that both close at once costs a retry
_KEEP_ALIVE_S = 4.0


class ARClient:
    """Posts to ``/generate`` with pooled connections, timeouts and retries.

    At most `max_inflight` requests are at the server; the rest wait in the order that they came.
    """

    def __init__(self, config: PriorConfig, metrics: PriorMetrics, watch: ServerWatch):
        self._config = config
        self._metrics = metrics
        self._watch = watch
        self._slots = asyncio.Semaphore(config.max_inflight)
        self._session: aiohttp.ClientSession | None = None  # made on the loop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="glm-image-prior", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        return f"AR server {self._config.shown_url}"

    def submit(self, work: Coroutine[Any, Any, Answer]) -> Future:
        """Run `work` on the client's loop. Cancelling the future cancels what it waits for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is in flight and end the thread."""
        self.submit(self._close()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # or their futures stay pending
        if self._session is not None:
            await self._session.close()

    async def generate(
        self, body: Callable[[], bytes], read: Callable[[bytes], Answer]
    ) -> Answer:
        """Post what `body` makes until `read` makes an answer of what comes back.

        Args:
            body: JSON; made when the request gets its turn, for it can be large.
            read: raises `AttemptFailure`.

        Raises:
            PriorError: naming the server and the last cause.
        """
        deadline = time.monotonic() + self._config.total_timeout_s
        try:
            async with asyncio.timeout(self._config.total_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise self._too_late() from None
        try:
            self._metrics.begin()
            start = time.monotonic()
            status = 499  # cancelled: nobody waits any more
            try:
                answer = await self._until_deadline(body(), read, deadline)
                status = 200
                return answer
            except PriorError as error:
                status = error.status
                raise
            finally:
                self._metrics.end(status, time.monotonic() - start)
        finally:
            self._slots.release()

    def _too_late(self, cause: str | None = None) -> PriorError:
        before = f"; before that: {cause}" if cause else ""
        seconds = f"{self._config.total_timeout_s:g} s"
        return PriorError(504, self.name, f"no answer within {seconds} in all{before}")

    async def _until_deadline(
        self, body: bytes, read: Callable[[bytes], Answer], deadline: float
    ) -> Answer:
        attempt, cause = 0, None
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await self._attempt(body, read)
            except TimeoutError:
                raise self._too_late(cause) from None
            except AttemptFailure as failure:
                cause = f"{failure}, {attempt} attempts" if attempt > 1 else str(failure)
                delay = delay_s(attempt, random.random())
                out_of_time = time.monotonic() + delay >= deadline
                if not failure.kind.is_retried or out_of_time:
                    raise PriorError(failure.kind.status, self.name, cause) from None
                if attempt == 1:
                    logger.warning("%s: %s; trying again", self.name, failure)
                self._metrics.retry()
                await asyncio.sleep(delay)

    async def _attempt(self, body: bytes, read: Callable[[bytes], Answer]) -> Answer:
        config = self._config
        await self._watch.before_request()
        if self._session is None:
            self._session = self._open_session()
        try:
            async with self._session.post(config.url + "/generate", data=body) as response:
                answer = await response.read()
        except aiohttp.ConnectionTimeoutError:
            self._watch.lost()
            raise AttemptFailure(
                Kind.CONNECT_TIMEOUT, f"no connection within {config.connect_timeout_s:g} s"
            ) from None
        except aiohttp.SocketTimeoutError:
            raise AttemptFailure(
                Kind.READ_TIMEOUT, f"silent for {config.read_timeout_s:g} s (--srt-encoder-timeout)"
            ) from None
        except aiohttp.ClientPayloadError:
            raise AttemptFailure(Kind.TRUNCATED, "the answer ends half-way") from None
        except aiohttp.ClientConnectionError as error:
            if isinstance(error, aiohttp.ClientConnectorError):  # nobody listens
                self._watch.lost()
            raise AttemptFailure(Kind.UNREACHABLE, _describe(error)) from None
        except aiohttp.ClientError as error:
            raise AttemptFailure(Kind.WRONG, _describe(error)) from None
        await self._watch.confirm()
        if response.status != 200:
            text = answer[:200].decode(errors="replace").strip()
            raise AttemptFailure(
                kind_of_status(response.status), f"answered {response.status}: {text}"
            )
        return read(answer)

    def _open_session(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._connected)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._config.connect_timeout_s,
                sock_read=self._config.read_timeout_s,
            ),
            headers={"Content-Type": "application/json"},
            trace_configs=[trace],
        )

    async def _connected(self, *_args: Any) -> None:
        self._watch.connected()


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
