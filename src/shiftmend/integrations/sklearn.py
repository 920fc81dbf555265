"""scikit-learn: fitted estimators as modules, and `ShiftMender`, an estimator that adapts another one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.compose import TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import (
    ElasticNet,
    ElasticNetCV,
    Lasso,
    LassoCV,
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Ridge,
    RidgeCV,
)
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, GroupShuffleSplit, RandomizedSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor, nn

from shiftmend.adaptation.adapt import adapt
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.tables import Table, from_frame, is_frame
from shiftmend.introspection.input_map import apply_input_map
from shiftmend.profiles.collect import profile
from shiftmend.profiles.rehearsal import UNTOUCHED
from shiftmend.rehearsal.rehearse import MIN_SAMPLES, rehearse
from shiftmend.stats.groups import as_groups
from shiftmend.utils.checks import kind

Array = NDArray[np.float64]

SCALERS = (StandardScaler, RobustScaler, MinMaxScaler, MaxAbsScaler)
LINEAR_REGRESSORS = (LinearRegression, Ridge, RidgeCV, Lasso, LassoCV, ElasticNet, ElasticNetCV)
LINEAR_CLASSIFIERS = (LogisticRegression, LogisticRegressionCV, LinearDiscriminantAnalysis)
NETWORKS = (MLPRegressor, MLPClassifier)
SEARCHES = (GridSearchCV, RandomizedSearchCV)
SUPPORTED = (
    "PLSRegression, LinearDiscriminantAnalysis, LogisticRegression, linear regression, MLPs, behind scalers and PCA"
)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


class ColumnScale(nn.Module):
    """A layer that centres and scales each column: `(inputs - mean) * scale`.

    Args:
        mean: Values to subtract, `[D]`.
        scale: Factors of the differences, `[D]`.
    """

    def __init__(self, mean: Array, scale: Array) -> None:
        super().__init__()
        self.mean = nn.Parameter(_as_tensor(mean))
        self.scale = nn.Parameter(_as_tensor(scale))

    def forward(self, inputs: Tensor) -> Tensor:
        # The difference is computed first, because the product of spectra and scales would lose digits.
        return (inputs - self.mean) * self.scale


def to_module(estimator: Any) -> nn.Module:
    """Convert a fitted estimator or pipeline to a module with the same outputs.

    The features of the module are the scores of PLS, the components of PCA, the last hidden layer of an MLP, or else
    the scaled columns. A classifier returns logits `[N, classes]`, whose softmax is `predict_proba`; a regressor
    returns `[N, quantities]`. Everything is float32.

    Args:
        estimator: A fitted `PLSRegression`, `LinearDiscriminantAnalysis`, `LogisticRegression`, linear regressor or
            MLP; alone, in a `Pipeline` behind scalers and `PCA`, in a search, or in a `TransformedTargetRegressor` with
            a `StandardScaler`.

    Returns:
        A module in eval mode, with `features` and `head`.

    Raises:
        ShiftmendError: If the estimator is of another kind.
        NotFittedError: If the estimator is not fitted.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> inputs = np.random.default_rng(0).normal(size=(50, 4))
        >>> estimator = LogisticRegression().fit(inputs, inputs[:, 0] > 0)
        >>> module = to_module(estimator)
        >>> found = module(torch.from_numpy(inputs).float()).softmax(1).detach().numpy()
        >>> bool(np.allclose(found, estimator.predict_proba(inputs), atol=1e-5))
        True
    """
    check_supported(estimator)
    check_is_fitted(estimator)
    layers: list[nn.Module] = []
    *before, last = _list_steps(estimator, fitted=True)
    for step in before:
        layers.append(_make_scale(step) if isinstance(step, SCALERS) else _make_components(step))
    if isinstance(last, PLSRegression):
        layers += [ColumnScale(last._x_mean, 1 / last._x_std), _make_linear(last.x_rotations_.T, 0.0)]
        weight, bias = last.y_loadings_ * np.reshape(last._y_std, (-1, 1)), last.intercept_
    elif isinstance(last, NETWORKS):
        for matrix, offset in zip(last.coefs_[:-1], last.intercepts_[:-1], strict=True):
            layers += [_make_linear(matrix.T, offset), ACTIVATIONS[last.activation]()]
        weight, bias = last.coefs_[-1].T, last.intercepts_[-1]
    else:
        weight, bias = np.atleast_2d(last.coef_), last.intercept_
    bias = np.broadcast_to(bias, len(weight))
    if is_classifier(last) and len(weight) == 1:
        # Two logits, whose difference is the decision function.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    weight, bias = _undo_target_scaling(estimator, weight, bias)
    if not layers:
        ones = np.ones(weight.shape[1])
        layers = [ColumnScale(0 * ones, ones)]
    parts = {"features": nn.Sequential(*layers), "head": _make_linear(weight, bias)}
    return nn.Sequential(OrderedDict(parts)).eval()


def check_supported(estimator: Any) -> None:
    """Refuse an estimator that `to_module` cannot convert, fitted or not."""
    *before, last = _list_steps(estimator, fitted=False)
    good = (PLSRegression, *LINEAR_REGRESSORS, *LINEAR_CLASSIFIERS, *NETWORKS)
    # Subclasses may predict differently, so they are not treated as their parent.
    wrong = [step for step in before if type(step) not in (*SCALERS, PCA)] + [last] * (type(last) not in good)
    if wrong:
        raise ShiftmendError(f"Expected {SUPPORTED}; got {kind(wrong[0])}.")
    if getattr(last, "out_activation_", None) == "logistic" and last.n_outputs_ > 1:
        raise ShiftmendError("Expected one label a sample, got an MLPClassifier of several. Try one for each.")
    if any(isinstance(step, MinMaxScaler) and step.clip for step in before):
        raise ShiftmendError("Expected a MinMaxScaler without clip, got clip=True, which is not linear.")
    if isinstance(estimator, TransformedTargetRegressor) and type(estimator.transformer) is not StandardScaler:
        raise ShiftmendError("Expected a TransformedTargetRegressor with a StandardScaler, got another transformer.")


def _list_steps(estimator: Any, fitted: bool) -> list[Any]:
    """List the transformers and the final estimator of a pipeline, search or wrapper."""
    if isinstance(estimator, SEARCHES):
        return _list_steps(estimator.best_estimator_ if fitted else estimator.estimator, fitted)
    if isinstance(estimator, FrozenEstimator):
        return _list_steps(estimator.estimator, fitted)
    if isinstance(estimator, TransformedTargetRegressor):
        return _list_steps(estimator.regressor_ if fitted else estimator.regressor, fitted)
    if isinstance(estimator, Pipeline):
        steps = [step for _, step in estimator.steps if step is not None and not isinstance(step, str)]
        return [*steps[:-1], *_list_steps(steps[-1], fitted)] if steps else [estimator]
    return [estimator]


def _make_scale(scaler: Any) -> nn.Module:
    if isinstance(scaler, MinMaxScaler):
        return ColumnScale(-scaler.min_ / scaler.scale_, scaler.scale_)
    ones: Array = np.ones(scaler.n_features_in_)
    # A StandardScaler that does not centre still has a mean.
    centre = getattr(scaler, "center_", getattr(scaler, "mean_", None) if getattr(scaler, "with_mean", True) else None)
    return ColumnScale(
        0 * ones if centre is None else centre, ones if scaler.scale_ is None else 1 / np.asarray(scaler.scale_)
    )


def _make_components(pca: Any) -> nn.Module:
    whitening = np.sqrt(pca.explained_variance_)[:, None] if pca.whiten else 1.0
    ones = np.ones(pca.n_features_in_)
    linear = _make_linear(pca.components_ / whitening, 0.0)
    return nn.Sequential(ColumnScale(pca.mean_, ones), linear)


def _undo_target_scaling(estimator: Any, weight: Array, bias: Array) -> tuple[Array, Array]:
    """Fold the scaling of the target values into the head."""
    if isinstance(estimator, FrozenEstimator | GridSearchCV | RandomizedSearchCV):
        return _undo_target_scaling(getattr(estimator, "best_estimator_", estimator.estimator), weight, bias)
    if not isinstance(estimator, TransformedTargetRegressor):
        return weight, bias
    scaler = estimator.transformer_
    deviation = np.broadcast_to(1.0 if scaler.scale_ is None else scaler.scale_, len(bias))
    mean = np.broadcast_to(0.0 if scaler.mean_ is None else scaler.mean_, len(bias))
    return weight * deviation[:, None], bias * deviation + mean


def _make_linear(weight: Array, bias: Array | float) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        made.weight.copy_(_as_tensor(weight))
        made.bias.copy_(_as_tensor(np.broadcast_to(bias, len(weight))))
    return made


def _as_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def _has_classes(mender: ShiftMender) -> bool:
    return bool(is_classifier(mender.estimator))


class ShiftMender(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc] # sklearn is not annotated
    """An estimator that is fitted at home, adapted at a new site, and estimates its score there without labels.

    `fit` holds out a part of the home data, fits the estimator to the rest, profiles it, and rehearses with the
    held-out part. `adapt` adapts it to a site; `predict`, `predict_proba` and `score` use the last adapted module.

    Args:
        estimator: An estimator that `to_module` supports; a clone of it is fitted. A `FrozenEstimator` is not fitted
            again; in that case, call `fit` with home data that it was not fitted to.
        held_out: Share of the home data to rehearse with.
        rehearse: Whether to rehearse. Without a rehearsal, there are no estimates, and all data are used for fitting.
        quick: Whether the rehearsal leaves out the slowest methods and small sites.
        method: Method of `adapt`; see `shiftmend.adapt`.
        candidates: Methods that are rehearsed and that `"auto"` tries.
        random_state: Seed of all random numbers.
        device: Device to compute on.

    Attributes:
        estimator_: The fitted estimator.
        module_: The module that predicts: the converted estimator, or the result of `adapt`.
        profile_: The profile of home, with its rehearsal.
        adaptation_: The result of the last `adapt`.
        estimate_: The estimated score of the adapted module at that site; None without a rehearsal.
        classes_: Classes, if the estimator is a classifier.
        n_features_in_: Number of columns.
        feature_names_in_: Names of columns, if the home data had names.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> rng = np.random.default_rng(0)
        >>> inputs = rng.normal(size=(400, 3))
        >>> answers = inputs @ [1.0, 2.0, 3.0]
        >>> mender = ShiftMender(Ridge(), rehearse=False, method="match-mean").fit(inputs, answers)
        >>> site = inputs + 5
        >>> bool(mender.score(site, answers) < 0 < 0.99 < mender.adapt(site).score(site, answers))
        True
    """

    def __init__(
        self,
        estimator: Any,
        *,
        held_out: float = 1 / 3,
        rehearse: bool = True,
        quick: bool = False,
        method: Any = "auto",
        candidates: Iterable[Any] | None = None,
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.estimator = estimator
        self.held_out = held_out
        self.rehearse = rehearse
        self.quick = quick
        self.method = method
        self.candidates = candidates
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, groups: Any = None) -> ShiftMender:
        """Fit, profile and rehearse at home.

        Args:
            X: Home inputs `[N, D]`: an array, a data frame or a table.
            y: Classes `[N]`, or quantities `[N]` or `[N, quantities]`.
            groups: Name or number of each sample's group `[N]`, such as its patient, if samples come in groups. Whole
                groups are held out, and intervals allow for them; see `shiftmend.rehearse`.

        Returns:
            The estimator itself.

        Raises:
            ShiftmendError: If the estimator cannot be converted, groups are wrong, or there are too few samples to
                rehearse.
        """
        check_supported(self.estimator)
        table = self._read(X, columns=())
        y = column_or_1d(y) if _has_classes(self) else check_array(y, ensure_2d=False, dtype=np.float64)
        check_consistent_length(table, y)
        rows, kept = np.arange(len(table)), np.arange(0)
        groups = (table.groups or None) if groups is None else groups
        numbers = None if groups is None else as_groups(groups, len(table)).numpy()
        if self.rehearse:
            rows, kept = self._hold_out(rows, y, numbers)
        inputs = table.inputs.numpy()
        estimator = clone(self.estimator).fit(inputs[rows].astype(np.float64), y[rows])
        module = to_module(estimator)
        made = profile(module, Table(table.inputs[rows], table.columns), device=self.device, progress=False)
        if self.rehearse:
            made = rehearse(
                module,
                (table.inputs[kept], self._as_labels(y[kept], estimator)),
                made,
                quick=self.quick,
                candidates=self.candidates,
                groups=None if numbers is None else numbers[kept],
                seed=self.random_state,
                device=self.device,
                progress=False,
            )
        self._forget()
        self.estimator_, self.module_, self.profile_, self._home = estimator, module, made, module
        self.n_features_in_ = table.inputs.shape[1]
        if table.columns:
            self.feature_names_in_ = np.array(table.columns, dtype=object)
        if _has_classes(self):
            self.classes_ = estimator.classes_
        self._flat = y.ndim == 1
        return self

    def _hold_out(
        self, rows: NDArray[np.int64], y: Any, groups: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        number = int(self.held_out * len(rows))
        if groups is not None:
            split = GroupShuffleSplit(1, test_size=self.held_out, random_state=self.random_state)
            fitted, kept = next(split.split(rows, groups=groups))
            number = len(kept)
        if number < MIN_SAMPLES:
            raise DataError(
                f"Expected at least {MIN_SAMPLES} held-out samples to rehearse with, got {number} of {len(rows)}. "
                "Try a larger held_out, or rehearse=False."
            )
        if groups is None:
            fitted, kept = train_test_split(
                rows,
                test_size=self.held_out,
                random_state=self.random_state,
                stratify=y if _has_classes(self) else None,
            )
        return fitted, kept

    @staticmethod
    def _as_labels(y: Any, estimator: Any) -> Tensor:
        if not is_classifier(estimator):
            return _as_tensor(y)
        return torch.from_numpy(np.searchsorted(estimator.classes_, y).astype(np.int64))

    def _forget(self) -> None:
        for name in ("adaptation_", "estimate_", "feature_names_in_", "classes_"):
            if hasattr(self, name):
                delattr(self, name)

    def adapt(self, X: Any) -> ShiftMender:
        """Adapt the fitted estimator to a site, from unlabelled inputs.

        Args:
            X: Inputs of the site `[N, D]`. Columns of a data frame are identified by name.

        Returns:
            The estimator itself, which predicts with the adapted module from now on.

        Raises:
            ShiftmendError: If the inputs do not fit.
        """
        check_is_fitted(self)
        found = adapt(
            self._home,
            self._read(X),
            self.profile_,
            self.method,
            candidates=self.candidates if self.method == "auto" else None,
            seed=self.random_state,
            device=self.device,
            progress=False,
        )
        self.adaptation_, self.module_ = found, found.model
        self.estimate_ = None if found.estimate is None else found.estimate.after
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict classes or quantities.

        Args:
            X: Inputs `[N, D]`.

        Returns:
            Classes `[N]`, or quantities in the shape of `y`.
        """
        found = self._run(X)
        if _has_classes(self):
            return np.asarray(self.classes_[found.argmax(1)])
        return found[:, 0] if self._flat else found

    @available_if(_has_classes)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Predict the probability of each class, `[N, classes]`."""
        return torch.from_numpy(self._run(X)).softmax(1).numpy()

    @available_if(_has_classes)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> NDArray[Any]:
        """Return logits `[N, classes]`; for two classes, their difference `[N]`."""
        found = self._run(X)
        return found[:, 1] - found[:, 0] if found.shape[1] == 2 else found

    def transform(self, X: Any) -> NDArray[Any]:
        """Map inputs of the site to home, as the adapted module does with its inputs.

        Args:
            X: Inputs `[N, D]`.

        Returns:
            The mapped inputs `[N, D]`; unchanged if nothing was adapted.

        Raises:
            ShiftmendError: If the module was not adapted by matching inputs.
        """
        check_is_fitted(self)
        inputs = self._read(X).inputs
        mapped = apply_input_map(self.module_, inputs)
        name = self.adaptation_.manifest["method"]["name"] if hasattr(self, "adaptation_") else UNTOUCHED
        if mapped is None and name != UNTOUCHED:
            raise ShiftmendError(f"Expected a module that maps its inputs, got one mended by {name}. Try predict.")
        return (inputs if mapped is None else mapped).numpy()

    def score(self, X: Any, y: Any) -> float:
        """Score predictions with labels: the accuracy, or R2."""
        return float((accuracy_score if _has_classes(self) else r2_score)(y, self.predict(X)))

    def _run(self, X: Any) -> NDArray[np.float32]:
        check_is_fitted(self)
        inputs = self._read(X).inputs
        place = next(self.module_.parameters()).device
        with torch.no_grad():
            found: NDArray[np.float32] = self.module_(inputs.to(place)).cpu().numpy()
        return found

    def _read(self, X: Any, columns: Iterable[str] | None = None) -> Table:
        """Convert inputs to a table, in the order of home's columns."""
        names = tuple(getattr(self, "feature_names_in_", ()) if columns is None else columns)
        if is_frame(X):
            table = from_frame(X, names, "data")
        elif isinstance(X, Table):
            table = X.ordered(names, "the data")
        else:
            table = Table(torch.from_numpy(check_array(X, dtype=np.float32)))
        if columns is None and table.inputs.shape[1] != self.n_features_in_:
            raise DataError(
                f"X has {table.inputs.shape[1]} features, but ShiftMender is expecting {self.n_features_in_} features "
                "as input."
            )
        return table

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "profile_")

    def __sklearn_tags__(self) -> Any:
        tags, own = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.estimator_type, tags.classifier_tags = own.estimator_type, own.classifier_tags
        tags.regressor_tags, tags.target_tags = own.regressor_tags, own.target_tags
        return tags
