"""The protocol core: pure state machines of coordinator and receiver (docs/protocol.md).

``messages`` has the actions and events, ``coordinator`` the publisher's machine, ``follower`` the receiver's, which
the source baseline runs too. Nothing in this package sleeps, reads, writes, or asks a clock.
"""
