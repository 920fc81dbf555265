"""Estimators of scikit-learn as modules: the same outputs, and the habits of that library."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier, is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import PCA, KernelPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

import shiftmend
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.tables import Table
from shiftmend.integrations.sklearn import ShiftMender, to_module

Array = NDArray[Any]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)) * [1, 2, 3, 0.5, 1, 10] + [0, 5, -3, 1, 2, 40]
LATENT = (X - X.mean(0)) / X.std(0)
NEW = X[::-1] * 1.3 + 0.5
QUANTITIES = np.stack([LATENT @ RNG.normal(size=6) + 190, LATENT[:, 0] * 3], 1)


def outputs(module: torch.nn.Module, inputs: Array) -> Array:
    with torch.no_grad():
        return np.asarray(module(torch.from_numpy(inputs).float()).double())


def mlp(kind: Any, **options: Any) -> Any:
    return kind(hidden_layer_sizes=(5, 4), max_iter=20, random_state=0, tol=1.0, **options)


@pytest.mark.parametrize("answers", [QUANTITIES[:, 0], QUANTITIES], ids=["one", "two"])
@pytest.mark.parametrize(
    "estimator",
    [
        PLSRegression(3),
        PLSRegression(2, scale=False),
        LinearRegression(),
        Ridge(fit_intercept=False),
        Lasso(0.01),
        mlp(MLPRegressor, activation="tanh"),
        make_pipeline(StandardScaler(), PLSRegression(3)),
        make_pipeline(StandardScaler(with_mean=False), "passthrough", PCA(3), Ridge()),
        make_pipeline(StandardScaler(with_std=False), PCA(3, whiten=True), mlp(MLPRegressor)),
        make_pipeline(RobustScaler(), MinMaxScaler((-2, 1)), MaxAbsScaler(), LinearRegression()),
        TransformedTargetRegressor(make_pipeline(StandardScaler(), mlp(MLPRegressor)), transformer=StandardScaler()),
        GridSearchCV(make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": [0.1, 1]}, cv=2),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_regressors_predict_the_same(estimator: Any, answers: Array) -> None:
    fitted = clone(estimator).fit(X, answers)
    expected = fitted.predict(NEW).reshape(len(NEW), -1)
    found = outputs(to_module(fitted), NEW)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("classes", [np.array(["air", "CO"]), np.array([3, 5, 9])], ids=["binary", "three"])
@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(max_iter=1000),
        LinearDiscriminantAnalysis(),
        LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto"),
        LinearDiscriminantAnalysis(solver="lsqr"),
        mlp(MLPClassifier, activation="logistic"),
        make_pipeline(StandardScaler(), PCA(4), LogisticRegression()),
        make_pipeline(MinMaxScaler(), mlp(MLPClassifier)),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_classifiers_predict_the_same(estimator: Any, classes: Array) -> None:
    answers = classes[np.digitize(LATENT[:, 0] + LATENT[:, 1], [-0.5, 0.5][: len(classes) - 1])]
    fitted = clone(estimator).fit(X, answers)
    found = outputs(to_module(fitted), NEW)
    np.testing.assert_allclose(torch.from_numpy(found).softmax(1), fitted.predict_proba(NEW), atol=1e-5)
    np.testing.assert_array_equal(fitted.classes_[found.argmax(1)], fitted.predict(NEW))
    if hasattr(fitted, "decision_function"):
        decision = found[:, 1] - found[:, 0] if len(classes) == 2 else found
        expected = fitted.decision_function(NEW)
        np.testing.assert_allclose(decision, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (RandomForestClassifier(), "RandomForestClassifier"),
        (make_pipeline(SimpleImputer(), Ridge()), "SimpleImputer"),
        (make_pipeline(KernelPCA(), Ridge()), "KernelPCA"),
        (make_pipeline(MinMaxScaler(clip=True), Ridge()), "clip"),
        (TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp), "StandardScaler"),
        (torch.nn.Linear(2, 2), "Linear"),
        ("PLSRegression", "str"),
        (None, "None"),
        (Pipeline([("nothing", "passthrough")]), "Pipeline"),
    ],
)
def test_others_are_refused_before_any_work(estimator: Any, message: str) -> None:
    for refuse in (to_module, lambda one: ShiftMender(one).fit(X, QUANTITIES[:, 0])):
        with pytest.raises(ShiftmendError, match=message):
            refuse(estimator)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_estimators_in_a_state_that_cannot_be_converted() -> None:
    with pytest.raises(NotFittedError):
        to_module(PLSRegression())
    with pytest.raises(ShiftmendError, match="one label"):
        to_module(mlp(MLPClassifier).fit(X, LATENT[:, :2] > 0))


def test_a_module_goes_through_profile_adapt_and_verify() -> None:
    module = to_module(LinearDiscriminantAnalysis().fit(X, LATENT[:, 0] + LATENT[:, 1] > 0))
    made = shiftmend.profile(module, X, progress=False)
    before = shiftmend.verify(module, NEW, made).excess
    for method, options in (("match-moments", {}), ("fr", {"epochs": 2, "learning_rate": 0.1})):
        result = shiftmend.adapt(module, NEW, made, method, progress=False, **options)
        assert shiftmend.verify(result.model, NEW, made).excess < before


def test_shift_mender_follows_the_habits_of_the_library() -> None:
    mender = ShiftMender(Ridge(alpha=2.0), rehearse=False, method="match-moments")
    assert mender.get_params()["estimator__alpha"] == 2.0
    again = clone(mender.set_params(estimator__alpha=3.0, random_state=4))
    assert (again.estimator.alpha, again.random_state) == (3.0, 4)
    assert is_regressor(mender)
    assert is_classifier(ShiftMender(LogisticRegression()))
    assert not hasattr(mender, "predict_proba")
    with pytest.raises(NotFittedError):
        mender.predict(X)
    assert mender.fit(X, QUANTITIES[:, 0]) is mender
    assert mender.predict(X).shape == (120,)
    np.testing.assert_allclose(mender.predict(X), mender.estimator_.predict(X), rtol=1e-5)
    np.testing.assert_array_equal(mender.transform(X), X.astype(np.float32))
    for wrong in (X[:, :5], X[0], np.where(X > 40, np.nan, X)):
        with pytest.raises(ValueError, match=r"features|2D|NaN"):
            mender.predict(wrong)
    before = mender.score(NEW[::-1], QUANTITIES[:, 0])
    assert mender.adapt(NEW) is mender
    assert mender.score(NEW[::-1], QUANTITIES[:, 0]) > max(0.99, before)
    np.testing.assert_allclose(mender.transform(NEW).mean(0), X.mean(0), rtol=1e-4, atol=1e-4)
    copied = pickle.loads(pickle.dumps(mender))
    np.testing.assert_array_equal(copied.predict(NEW), mender.predict(NEW))
    assert mender.fit(X, QUANTITIES).predict(X).shape == (120, 2)
    assert not hasattr(mender, "adaptation_")


def test_columns_have_names() -> None:
    table = Table(torch.from_numpy(X).float(), tuple("abcdef"))
    mender = ShiftMender(LogisticRegression(max_iter=1000), rehearse=False, method="match-mean")
    mender.fit(table, np.where(LATENT[:, 0] > 0, "yes", "no"))
    assert list(mender.feature_names_in_) == list("abcdef")
    assert mender.profile_.inputs.columns == tuple("abcdef")
    turned = Table(table.inputs.flip(1), tuple("fedcba"))
    np.testing.assert_array_equal(mender.predict(turned), mender.estimator_.predict(X))
    np.testing.assert_allclose(mender.predict_proba(turned), mender.estimator_.predict_proba(X), atol=1e-5)
    decision = mender.estimator_.decision_function(X)
    np.testing.assert_allclose(mender.decision_function(turned), decision, atol=1e-4)
    with pytest.raises(DataError, match="lacks a"):
        mender.adapt(Table(table.inputs, tuple("ghijkl")))
    with pytest.raises(ShiftmendError, match="mended by neo"):
        mender.set_params(method="neo").adapt(turned).transform(turned)


def test_a_frozen_estimator_stays_as_it_is() -> None:
    fitted = Ridge().fit(X[:60], QUANTITIES[:60, 0])
    mender = ShiftMender(FrozenEstimator(fitted), rehearse=False).fit(X[60:], QUANTITIES[60:, 0])
    np.testing.assert_allclose(mender.predict(X), fitted.predict(X), rtol=1e-5)


def test_too_few_samples_to_hold_out() -> None:
    with pytest.raises(DataError, match="held_out"):
        ShiftMender(Ridge()).fit(X[:60], QUANTITIES[:60, 0])


def test_whole_groups_are_held_out() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(240, 2))
    who = np.repeat([f"patient {number}" for number in range(12)], 20)
    mender = ShiftMender(Ridge(), held_out=0.5, quick=True, candidates=["match-mean"])
    mender.fit(inputs, inputs @ [1.0, 2.0] + 0.1 * rng.normal(size=240), groups=who)
    record = mender.profile_.rehearsal
    assert (record.groups, record.samples) == (6, 120)
    with pytest.raises(DataError, match="one group for each"):
        mender.fit(inputs, inputs[:, 0], groups=who[:5])
    with pytest.raises(DataError, match="held_out"):
        mender.set_params(held_out=0.05).fit(inputs, inputs[:, 0], groups=who)
