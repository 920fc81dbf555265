from __future__ import annotations

from dataclasses import replace

from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.regression import RegressionScores


def test_scores_print_as_one_line_for_people() -> None:
    scores = Scores(1234, 0.98765, 0.012, 0.3, 0.0456789, 0.02, ())
    assert str(scores) == "samples 1,234, accuracy 98.8 %, ece 1.2 %, mce 30.0 %, nll 0.04568, brier 0.02"
    assert "0.98765" in repr(scores)
    assert str(replace(scores, samples=12345)).startswith("samples 12,345, accuracy")
    flat = RegressionScores(3, 0.5, 0.75, None)
    assert str(flat) == "samples 3, mean_absolute_error 0.5, root_mean_square_error 0.75"
