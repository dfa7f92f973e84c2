"""The relay: a store behind HTTP, in front of a bounded cache and a parent store (docs/relays.md)."""
