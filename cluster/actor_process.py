"""What the process of every actor can be asked, whatever it hosts."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from antiphon.cluster.process_identity import ProcessIdentity


class ActorProcess:
    """Base of all actors of a deployment."""

    async def wait_for_ever(self) -> NoReturn:
        """Pending for as long as the process lives: its failure is how a death is noticed."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def identity(self) -> ProcessIdentity:
        """Which process this is."""
        return ProcessIdentity.of_this_process()
