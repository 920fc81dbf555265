"""Questions put to results: comparisons, correlations, toy problems."""
