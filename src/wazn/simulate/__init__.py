"""Model x Recipe -> Timeline, without torch: a tape of tensor sizes, ops as contracts, blocks that read like model code."""
