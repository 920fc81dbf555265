"""What only a researcher needs: networks, data sets, benchmarks, analyses, figures."""
