# SPDX-License-Identifier: Apache-2.0
"""Notices that the AR server is another one than was checked, beside the requests.

A connection leads to one process as long as it lives. So it is enough to look at the server after
each new connection: the look runs beside the request, and its answer is not used before the look is
done. A router keeps its connections when a server behind it is replaced, so there are looks now and
then too. One whose server for such questions is dead or stuck cannot tell, until it counts that
server out; the others still write, and what they write is used.
"""

import asyncio
import time
from collections.abc import Callable

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

from .retry import AttemptFailure, Kind
from .server_check import (
    ARServerLost,
    ARServerUnfit,
    ARServerUntold,
    ServerFacts,
    check_architecture,
    model_info,
    model_of,
)

logger = init_logger(__name__)

_LOOK_EVERY_S = 5.0  # while requests come
_LOOKS, _LOOK_AGAIN_S = 3, 0.3  # before an answer that cannot be confirmed is asked for again
_PATIENCE_S = 5.0  # with a look that gets no answer
_RESTART_S = 5.0  # no server is started again and has loaded its model sooner
_FRESH_S = 1.0  # no need to look again before tokens of the cache are used


class ServerLook:
    """Asks the AR server for its model, and checks it where that is another one. Blocking."""

    def __init__(
        self,
        config: PriorConfig,
        check: Callable[[], ServerFacts],
        model: tuple[str | None, str | None],
    ):
        """
        Args:
            check: raises `ARServerUnfit`.
            model: of the server that was checked, see `ServerFacts`.
        """
        self._config = config
        self._check = check
        self._model = model
        self._unfit = False

    def again(self, *, anew: bool = False) -> ServerFacts | None:
        """What the server told, or None where it serves what it served before.

        Args:
            anew: it was started again, so its flags may be others.

        Raises:
            ARServerUnfit: see `check`.
        """
        info = model_info(self._config)
        try:
            check_architecture(self._config, info)
            known = not self._unfit and self._model == model_of(info)
            if known and not anew:
                return None
            facts = self._check_model(known)
        except ARServerLost:
            raise
        except ARServerUnfit as error:
            if not self._unfit:
                logger.error("%s", error)
            self._unfit = True
            raise
        if self._unfit or self._model != facts.model:
            logger.warning("AR server %s serves %s", self._config.shown_url, facts.model)
        self._unfit, self._model = False, facts.model
        return facts

    def _check_model(self, known: bool) -> ServerFacts:
        """What another model has written is not used before that one was tried."""
        try:
            return self._check()
        except ARServerUntold as error:
            if known:
                raise
            raise ARServerLost(self._config, error.cause) from None


class ServerWatch:
    """When to look, for the client; on its loop alone.

    Attributes:
        facts: what the AR server told when it was last found fit.
    """

    def __init__(self, look: ServerLook, facts: ServerFacts):
        self.facts = facts
        self._look = look
        self._unfit: str | None = None
        self._anew = False  # it may have been started again since the last look
        self._opened = 0  # connections
        self._covered = 0  # of those, opened before the last look
        self._looked_at = self._heard_at = time.monotonic()
        self._looking: asyncio.Task | None = None

    def connected(self) -> None:
        """A connection was opened."""
        self._opened += 1
        if time.monotonic() - self._heard_at > _RESTART_S:
            self.lost()
        self._begin()

    def lost(self) -> None:
        """No connection could be made: what takes one next was started again."""
        self._anew = True

    async def before_request(self) -> None:
        """
        Raises:
            AttemptFailure: where the server serves another model, still.
        """
        if self._unfit is not None:
            await self._looked()
        elif time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._begin()
        self._raise_if_unfit()

    async def confirm(self) -> None:
        """After an answer came, before it is used.

        Raises:
            AttemptFailure: for an answer of another model.
        """
        opened = self._opened
        start, failed = time.monotonic(), 0
        while self._covered < opened:
            try:
                await self._looked()
            except AttemptFailure as failure:
                failed += 1
                if failed == _LOOKS or time.monotonic() - start > _PATIENCE_S:
                    if failure.kind is not Kind.BUSY:
                        raise
                    self._covered = max(self._covered, opened)
                    break
                await asyncio.sleep(_LOOK_AGAIN_S)
        self._raise_if_unfit()
        self._heard_at = time.monotonic()

    async def wrote(self, weight_version: str | None) -> bool:
        """Whether the model that `facts` name wrote an answer that told this version, or none."""
        if weight_version in (None, self.facts.weight_version):
            return True
        await self._looked_if_there()  # weights were updated, or a router has several versions
        return weight_version == self.facts.weight_version

    async def refresh(self) -> None:
        """Look unless that was done just now; for a server that is away nobody waits."""
        if time.monotonic() - self._looked_at < _FRESH_S:
            return
        if self._anew:
            self._begin()
        else:
            await self._looked_if_there()

    async def _looked_if_there(self) -> None:
        await asyncio.wait({self._begin()}, timeout=_PATIENCE_S)

    def _raise_if_unfit(self) -> None:
        if self._unfit is not None:
            raise AttemptFailure(Kind.WRONG, self._unfit)

    def _begin(self) -> asyncio.Task:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_again())
            self._looking.add_done_callback(_read_exception)
        return self._looking

    async def _looked(self) -> None:
        await asyncio.shield(self._begin())

    async def _look_again(self) -> None:
        opened = self._opened
        anew, self._anew = self._anew, False
        self._looked_at = time.monotonic()
        try:
            self.facts = await asyncio.to_thread(self._look.again, anew=anew) or self.facts
            self._unfit = None
        except ARServerLost as error:
            self._anew = True
            kind = Kind.BUSY if isinstance(error, ARServerUntold) else Kind.UNREACHABLE
            raise AttemptFailure(kind, error.cause) from None
        except ARServerUnfit as error:
            self._unfit = error.cause
        self._covered = opened


def _read_exception(look: asyncio.Task) -> None:
    """Nobody may have waited for it."""
    if not look.cancelled():
        look.exception()
