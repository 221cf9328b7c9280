"""The currency: events, the allocator's replay, the breakdown of a peak. Knows no model and no torch."""
