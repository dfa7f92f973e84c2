"""Live weights of a serving engine, written where they lie: which element stands where, and how bits get there."""
