"""The frames between a router and its grammar compiler process."""

import struct

LENGTH = struct.Struct("!I")
"""Length prefix of every frame."""
FOLLOWED, REFUSED = b"+", b"-"
"""First byte of an answer."""
