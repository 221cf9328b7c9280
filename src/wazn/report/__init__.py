"""Words and pictures: the core returns codes and numbers, these rooms speak."""
