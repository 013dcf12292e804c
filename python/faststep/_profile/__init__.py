"""The profile of a step: its operations one by one, and the stages of real calls. Uses `_step` and `_native`."""

from faststep._profile._profile import Profile, profile
from faststep._profile._recording import KINDS

__all__ = ["KINDS", "Profile", "profile"]
