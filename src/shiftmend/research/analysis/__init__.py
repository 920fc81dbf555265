"""Analysis of results: paired comparisons, correlations, and toy problems."""
