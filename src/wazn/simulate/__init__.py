"""Model x Recipe -> Timeline, without torch: a tape of sizes, ops as contracts, blocks that read like model code."""
