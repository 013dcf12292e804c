"""Search of what a loss reads, for the list that is compared before a call is left out.

A training step calls the loss, or leaves the call out while everything that the loss reads is unchanged. `search` lists
what it reads if all of it is on a short white list; otherwise it gives the reason, and the loss is called at each step.
`search_update` does the same for the update of an optimizer. Uses `_native`.
`Calls` checks one call: no unknown function may run. In doubt both refuse, which only costs the call.
"""

from faststep._reach._calls import Calls
from faststep._reach._entries import ABSENT, Entry, Found
from faststep._reach._search import search, search_update

__all__ = ["ABSENT", "Calls", "Entry", "Found", "search", "search_update"]
