"""The keeper: a tiny process that holds what must outlive the engine, and starts the next one.

It does nothing that can fail: it holds descriptors (the space, the listening socket, locks, each
session's socket and arenas), waits for the engine's end, starts it again, and passes signals on.
The engine hands it every descriptor before anybody else gets to know of it; a new engine gets them
all back. What the memory behind them means is the engine's business.
"""

from momentd_server.keeper.keeper import Keeper
from momentd_server.keeper.kept import Kept, KeptByKeeper

__all__ = ["Keeper", "Kept", "KeptByKeeper"]
