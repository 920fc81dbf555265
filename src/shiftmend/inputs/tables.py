"""Reading tables: CSV, Parquet and MATLAB files, and data frames. Columns are identified by name, in any order."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike
from shiftmend.utils.checks import brief, counted, require
from shiftmend.utils.files import as_path

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".mat")
"""File endings that `read_table` reads."""
MISSING = frozenset({"", "na", "<na>", "n/a", "nan", "null", "none", "-", "?"})
"""Cell contents that mean a missing value, in lower case."""
MAX_NAMES_SHOWN = 3
MAX_CLASSES_SHOWN = 12


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Rows of numbers with named columns and, optionally, labels. Every function that takes data accepts a table.

    Attributes:
        inputs: Floating-point values `[N, D]`, or `[N, ...]` from a MATLAB file.
        columns: Names of the `D` columns, in order; empty if they have no names.
        labels: Class numbers `[N]`, quantities `[N]` or `[N, quantities]`, or None.
        classes: Names of the classes, in the order of their numbers.
        groups: Name of each row's group, such as its patient or recording; empty if rows are independent.

    >>> Table(torch.zeros(2, 3), ("a", "b", "c"))
    2 rows, columns a, b, c, without labels
    """

    inputs: Tensor
    columns: tuple[str, ...] = ()
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        names = f"columns {_summarise(self.columns)}" if self.columns else f"inputs {list(self.inputs.shape[1:])}"
        labels = "without labels" if self.labels is None else f"labels {list(self.labels.shape)}"
        return f"{counted(len(self), 'row')}, {names}, {labels}"

    def ordered(self, columns: Sequence[str], what: str) -> Table:
        """Return the table with these columns in this order; errors call the table `what`."""
        if not self.columns or not columns or self.columns == tuple(columns):
            return self
        places = match_columns(self.columns, columns, what)
        return replace(self, inputs=self.inputs[:, places], columns=tuple(columns))


def read_table(
    path: PathLike,
    *,
    label: str | None = None,
    classes: Sequence[str] = (),
    quantities: Sequence[str] = (),
    group: str | None = None,
    drop: Collection[str] = (),
    where: Mapping[str, str] | None = None,
    columns: Sequence[str] = (),
) -> Table:
    r"""Read a table from a CSV, Parquet or MATLAB file.

    The first line of a CSV file names its columns. Cells are separated by commas, semicolons or tabs; with semicolons
    and tabs, numbers may have decimal commas. In a MATLAB file (up to version 7), the only matrix is the inputs, and
    `label`, `quantities`, `group` and `where` name vectors.

    Args:
        path: The file.
        label: Column with class numbers, or with the names in `classes`.
        classes: Names of the classes, in the order of their numbers.
        quantities: Columns with the quantities that a model predicts.
        group: Column that names the patient, recording or object of each row, if several rows belong to one.
        drop: Columns to leave out.
        where: Values by column, e.g. `{"board": "3"}`; only rows with these values are read.
        columns: Columns to use as inputs, in this order. By default, all columns without another use.

    Returns:
        The table. Every function of shiftmend that takes data accepts it, and a profile stores its column names.

    Raises:
        DataError: If the file is missing or damaged, columns are missing, or a cell is not a number.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name, "home.csv")
        >>> _ = file.write_text("site,1100,1102,assay\nA,0.5,0.25,190\nB,0.5,0.75,200\nA,0.25,0.5,210\n")
        >>> table = read_table(file, quantities=["assay"], where={"site": "A"})
        >>> table
        2 rows, columns 1100, 1102, labels [2]
        >>> table.labels
        tensor([190., 210.])
        >>> folder.cleanup()
    """
    file = as_path(path, "the table", DataError)
    choice = _Choice(label, tuple(classes), tuple(quantities), group, tuple(drop), dict(where or {}), tuple(columns))
    if label is not None and quantities:
        raise DataError("Expected class labels or quantities, got both. Try leaving one of them out.")
    if not file.is_file():
        raise DataError(f"Expected a table, got {file}, which is no file.")
    if file.suffix.lower() == ".mat":
        return _read_mat(file, choice)
    if file.suffix.lower() == ".parquet":
        return _assemble(file, _ParquetFile(file), choice)
    if file.suffix.lower() in TEXT_SUFFIXES:
        return _assemble(file, _TextFile(file, named=bool(columns)), choice)
    raise DataError(f"Expected a file that ends in {', '.join(SUFFIXES)}, got {file}. Try saving it as CSV.")


def is_frame(source: Any) -> bool:
    """Tell whether an object is a data frame, e.g. of pandas or polars."""
    return hasattr(source, "to_numpy") and hasattr(source, "columns")


def from_frame(frame: Any, columns: Sequence[str], what: str) -> Table:
    """Convert these columns of a data frame, or all, to a table; errors call the frame `what`."""
    names = tuple(str(name) for name in frame.columns)
    _check_distinct(names, f"the {what}")
    if columns:
        keys = list(frame.columns)
        frame = frame[[keys[place] for place in match_columns(names, columns, f"the {what}")]]
        names = tuple(columns)
    values = frame.to_numpy()
    if values.dtype.kind not in "biuf":
        # Columns are converted one by one, because pandas may give several columns of numbers the dtype object.
        found = [_read_column(np.asarray(frame[key]), str(key), what) for key in frame.columns]
        values = np.stack(found, axis=1) if found else np.empty((len(frame), 0))
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    if missing.any():
        row, place = (int(index) for index in np.argwhere(missing)[0])
        raise DataError(
            f"Expected numbers in column {names[place]!r} of the {what}, got a missing value in row {row}, counted "
            "from 0. Try dropna()."
        )
    return Table(torch.from_numpy(np.array(values, np.float64)).to(torch.get_default_dtype()), names)


def match_columns(found: Sequence[str], expected: Sequence[str], what: str) -> list[int]:
    """Return the positions of the expected columns in a table; errors call the table `what`.

    Names that are numbers are compared by value, so that 1100 and 1100.0 are the same wavelength.

    Example:
        >>> match_columns(["b", "id", "a"], ["a", "b"], "the table")
        [2, 0]
    """
    places = {name: place for place, name in enumerate(found)}
    if all(name in places for name in expected):
        return [places[name] for name in expected]
    wanted, own = _numbers(expected), _numbers(found)
    by_value = {value: place for place, value in enumerate(own) if value is not None}
    if all(value in by_value for value in wanted):
        return [by_value[value] for value in wanted if value is not None]
    lacking = [name for name, value in zip(expected, wanted, strict=True) if not (name in places or value in by_value)]
    numbers = [name for name, value in zip(found, own, strict=True) if value is not None]
    if None not in wanted and 2 * len(lacking) > len(expected) and len(numbers) > 1:
        if _looks_like_values(numbers):
            raise DataError(f"Expected names of columns in the first line of {what}, got values. Try adding the names.")
        raise DataError(
            f"Expected the {_span(expected)} of home in {what}, got {_span(numbers)}. Try resampling the spectra to "
            "those of home."
        )
    strange = [name for name in found if name not in set(expected)]
    others = f"got {_summarise(strange)} instead" if strange else "got only the others"
    raise DataError(f"Expected the columns of home in {what}, which lacks {_summarise(lacking)}; {others}.")


class _Choice(NamedTuple):
    """The roles of the columns."""

    label: str | None
    classes: tuple[str, ...]
    quantities: tuple[str, ...]
    group: str | None
    drop: tuple[str, ...]
    where: dict[str, str]
    columns: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the columns that are read as text."""
        return (*self.where, *(name for name in (self.label, self.group) if name is not None))

    def inputs(self, names: Sequence[str], what: str) -> tuple[str, ...]:
        """Return the names of the input columns."""
        # The columns of home determine the inputs.
        for name in (*self.texts, *self.quantities, *(() if self.columns else self.drop)):
            if name not in names:
                raise DataError(f"Expected a column {name!r} in {what}, got {_summarise(names)}.")
        if self.columns:
            return tuple(names[place] for place in match_columns(names, self.columns, what))
        used = {*self.texts, *self.quantities, *self.drop}
        left = tuple(name for name in names if name not in used)
        if not left:
            raise DataError(f"Expected columns for the inputs in {what}, got none beside those with another use.")
        return left


class _Rows(NamedTuple):
    """The chosen rows of a file."""

    numbers: NDArray[np.float64]
    texts: list[dict[str, str]]
    lines: Sequence[int]
    """Line number of each row, for errors."""


class _TextFile:
    """A text file with separated cells, whose first line names the columns."""

    def __init__(self, path: Path, named: bool) -> None:
        content = path.read_bytes()
        if content[:2] in (b"PK", b"\xd0\xcf"):
            raise DataError(f"Expected text in {path}, got a workbook. Try saving the sheet as CSV.")
        try:
            text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        except UnicodeDecodeError:
            # Western Windows spreadsheets use this encoding, in which every byte is valid.
            text = content.decode("latin-1")
        if "\0" in text:
            raise DataError(f"Expected text in {path}, got binary data. Try saving it as CSV.")
        self.path, first = path, text.lstrip("\r\n").partition("\n")[0]
        self.separator = next((mark for mark in "\t;" if mark in first), ",")
        self._lines = csv.reader(io.StringIO(text, newline=""), delimiter=self.separator)
        header = [name.strip() for name in next(self._filled(), (0, []))[1]]
        if not header:
            raise DataError(f"Expected a table in {path}, got an empty file.")
        self._places = {name: place for place, name in enumerate(header) if name}
        self._width = len(header)
        if not named and _looks_like_values(header):
            raise DataError(f"Expected names of columns in the first line of {path}, got values. Try adding the names.")
        if len(self._places) < self._width:
            unnamed = [str(place + 1) for place, name in enumerate(header) if not name]
            _check_distinct([name for name in header if name], str(path))
            logger.warning("column %s of %s has no name and is left out", _summarise(unnamed), path)
        self.names = list(self._places)

    def _filled(self) -> Iterator[tuple[int, list[str]]]:
        """Yield lines that are not blank, with their numbers."""
        try:
            for cells in self._lines:
                if any(cell.strip() for cell in cells):
                    yield self._lines.line_num, cells
        except csv.Error as error:
            raise DataError(f"Expected a table in {self.path}, got damaged lines ({error}).") from error

    def read(self, inputs: Sequence[str], choice: _Choice) -> _Rows:
        """Read the chosen rows."""
        numeric = [self._places[name] for name in inputs]
        numbers, texts, lines = [], [], []
        for line, cells in self._filled():
            # Some programs end each line with a separator.
            if len(cells) > self._width and not any(cell.strip() for cell in cells[self._width :]):
                cells = cells[: self._width]
            if len(cells) != self._width:
                raise DataError(
                    f"Expected {self._width} cells in line {line} of {self.path}, as in the first, got {len(cells)}."
                )
            text = {name: cells[self._places[name]].strip() for name in choice.texts}
            if all(_is_same(text[name], value) for name, value in choice.where.items()):
                numbers.append(self._parse([cells[place] for place in numeric], inputs, line))
                texts.append(text)
                lines.append(line)
        return _Rows(np.array(numbers, np.float64).reshape(len(numbers), len(inputs)), texts, lines)

    def _parse(self, cells: list[str], names: Sequence[str], line: int) -> NDArray[np.float64]:
        if self.separator != ",":
            cells = [cell.replace(",", ".") for cell in cells]
        try:
            return np.array([*map(float, cells)])
        except ValueError:
            return np.array([self._parse_cell(*cell, line) for cell in zip(cells, names, strict=True)])

    def _parse_cell(self, cell: str, name: str, line: int) -> float:
        if cell.strip().lower() in MISSING:
            return np.nan
        try:
            return float(cell)
        except ValueError:
            raise _no_number(name, f"{self.path}, line {line}", brief(cell.strip())) from None


class _ParquetFile:
    """A Parquet file; only the chosen columns are read."""

    def __init__(self, path: Path) -> None:
        self._parquet, self._arrow = require("pyarrow.parquet", "tables"), require("pyarrow", "tables")
        self.path = path
        try:
            # pandas stores the index of a data frame under this column name.
            self._schema = self._parquet.read_schema(path)
        except (OSError, self._arrow.ArrowException) as error:
            raise DataError(f"Expected a Parquet file, got {path}, which is damaged or none.") from error
        self.names = [name for name in self._schema.names if not name.startswith("__index_level_")]
        _check_distinct(self.names, str(path))

    def read(self, inputs: Sequence[str], choice: _Choice) -> _Rows:
        """Read the chosen rows."""
        try:
            table = self._parquet.read_table(self.path, columns=[*dict.fromkeys((*inputs, *choice.texts))])
        except (OSError, self._arrow.ArrowException) as error:
            raise DataError(f"Expected a Parquet file, got {self.path}, which is damaged.") from error
        texts = {name: [_as_text(cell) for cell in table.column(name).to_pylist()] for name in choice.texts}
        kept = [
            row
            for row in range(table.num_rows)
            if all(_is_same(texts[name][row], value) for name, value in choice.where.items())
        ]
        types = self._arrow.types
        for name in inputs:
            own = self._schema.field(name).type
            if not any(fits(own) for fits in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)):
                raise _no_number(name, str(self.path), str(own))
        parts = [np.asarray(table.column(name).cast("float64").to_numpy(), np.float64)[kept] for name in inputs]
        return _Rows(np.stack(parts, 1), [{name: texts[name][row] for name in texts} for row in kept], kept)


def _assemble(path: Path, file: _TextFile | _ParquetFile, choice: _Choice) -> Table:
    """Read inputs and labels from an open file."""
    inputs = choice.inputs(file.names, str(path))
    rows = file.read((*inputs, *choice.quantities), choice)
    if not len(rows.numbers):
        raise DataError(f"Expected rows {_describe(choice.where)}in {path}, got none.")
    if not np.isfinite(rows.numbers).all():
        row, place = (int(index) for index in np.argwhere(~np.isfinite(rows.numbers))[0])
        name = (*inputs, *choice.quantities)[place]
        unit = "line" if isinstance(file, _TextFile) else "row"
        raise DataError(
            f"Expected a number in column {name!r} of {path}, got a missing or infinite value in {unit} "
            f"{rows.lines[row]}. Try leaving out that {unit}."
        )
    values = torch.from_numpy(rows.numbers).to(torch.float32)
    labels = values[:, len(inputs) :] if choice.quantities else None
    if choice.label is not None:
        labels = _number_classes([text[choice.label] for text in rows.texts], choice, path)
    elif labels is not None and labels.shape[1] == 1:
        labels = labels[:, 0]
    # A column that is called 1100 at home may be called 1100.0 here.
    names = choice.columns or inputs
    groups = () if choice.group is None else tuple(text[choice.group] for text in rows.texts)
    return Table(values[:, : len(inputs)].contiguous(), names, labels, choice.classes, groups)


def _number_classes(texts: Sequence[str], choice: _Choice, path: Path) -> Tensor:
    """Turn a column of class names or class numbers into int64 labels."""
    name = choice.label
    if choice.classes:
        numbers = {text: number for number, text in enumerate(choice.classes)}
        strange = next((text for text in texts if text not in numbers), None)
        if strange is not None:
            raise DataError(
                f"Expected {_summarise(choice.classes)} in column {name!r} of {path}, got {strange!r}. Try all classes."
            )
        return torch.tensor([numbers[text] for text in texts], dtype=torch.int64)
    values = _numbers(texts)
    if any(value is None or not value.is_integer() for value in values):
        fractions = None not in values
        wrong = next(t for t, value in zip(texts, values, strict=True) if value is None or not value.is_integer())
        named = f"classes= (--classes {_list_some(texts)}), in the order of the model's outputs"
        remedy = f"Try {f'quantities= (--quantity {name})' if fractions else named}"
        raise DataError(f"Expected class numbers in column {name!r} of {path}, got {brief(wrong)}. {remedy}.")
    return torch.tensor([int(value) for value in values if value is not None], dtype=torch.int64)


def _read_mat(path: Path, choice: _Choice) -> Table:
    """Read the only matrix of a MATLAB file as inputs, and vectors as labels."""
    reader = require("scipy.io", "tables")
    try:
        found = reader.loadmat(path)
    except NotImplementedError as error:
        raise DataError(f"Expected a MATLAB file up to version 7, got {path}. Try save(..., '-v7').") from error
    except (OSError, ValueError, TypeError, EOFError, reader.matlab.MatReadError) as error:
        raise DataError(f"Expected a MATLAB file, got {path}, which is damaged or none.") from error
    arrays = {name: np.asarray(value) for name, value in found.items() if not name.startswith("__")}
    matrices = {
        name: value
        for name, value in arrays.items()
        if value.dtype.kind in "biuf"
        and sum(size > 1 for size in value.shape) > 1
        and name not in (*choice.texts, *choice.quantities, *choice.drop)
    }
    if len(matrices) != 1:
        raise DataError(
            f"Expected one matrix of inputs in {path}, got {_summarise(list(matrices)) or 'none'}. Try dropping others."
        )
    ((name, inputs),) = matrices.items()
    vectors = {key: _find_vector(arrays, key, path, name, inputs.shape) for key in (*choice.texts, *choice.quantities)}
    kept = np.array([True] * len(inputs))
    for key, wanted in choice.where.items():
        kept &= np.array([_is_same(_as_text(cell), wanted) for cell in vectors[key]])
    if not kept.any():
        raise DataError(f"Expected rows {_describe(choice.where)}in {path}, got none.")
    values = _as_numbers(inputs[kept], name, path)
    labels = None
    if choice.label is not None:
        labels = _number_classes([_as_text(cell) for cell in vectors[choice.label][kept]], choice, path)
    elif choice.quantities:
        parts = [_as_numbers(vectors[key][kept], key, path).view(len(values), -1) for key in choice.quantities]
        labels = torch.cat(parts, 1)
        labels = labels[:, 0] if labels.shape[1] == 1 else labels
    groups = () if choice.group is None else tuple(_as_text(cell) for cell in vectors[choice.group][kept])
    return Table(values, (), labels, choice.classes, groups)


def _as_numbers(values: NDArray[Any], name: str, path: Path) -> Tensor:
    """Convert a variable of a MATLAB file to float32."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"Expected numbers in {name} of {path}, got {values.dtype}. Try another variable.")
    if not np.isfinite(values).all():
        raise DataError(f"Expected numbers in {name} of {path}, got missing or infinite values. Try repairing them.")
    return torch.from_numpy(values.astype(np.float32))


def _find_vector(
    arrays: Mapping[str, NDArray[Any]], key: str, path: Path, name: str, shape: Sequence[int]
) -> NDArray[Any]:
    """Return a vector of a MATLAB file, with one entry per sample."""
    if key not in arrays:
        raise DataError(f"Expected a variable {key!r} in {path}, got {_summarise(list(arrays))}.")
    vector = arrays[key]
    vector = vector.reshape(-1) if 1 in vector.shape else vector
    if len(vector) != shape[0]:
        turned = ". Try transposing it" if len(vector) in shape[1:] else ""
        raise DataError(f"Expected {len(vector)} rows in {name} of {path}, as in {key}, got {shape[0]}{turned}.")
    return vector


def _read_column(values: NDArray[Any], name: str, what: str) -> NDArray[np.float64]:
    """Convert one column of a data frame, with NaN for missing values; refuse text and dates."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    read: list[float] = []
    for cell in values:
        if str(cell).strip().lower() in MISSING:
            read.append(np.nan)
        elif isinstance(cell, Real):
            read.append(float(cell))
        else:
            raise _no_number(name, f"the {what}", brief(cell))
    return np.array(read, np.float64)


def _no_number(name: str, what: str, got: str) -> DataError:
    return DataError(f"Expected numbers in column {name!r} of {what}, got {got}. Try leaving it out (--drop).")


def _check_distinct(names: Sequence[str], what: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise DataError(f"Expected columns of different names in {what}, got {twice!r} twice. Try renaming one.")


def _looks_like_values(header: Sequence[str]) -> bool:
    """Tell whether a first line holds values instead of names: unlike wavelengths, they neither rise nor fall."""
    values = [value for value in _numbers(header) if value is not None]
    rises = np.diff(values)
    return len(values) == len(header) > 1 and not (bool((rises > 0).all()) or bool((rises < 0).all()))


def _numbers(texts: Sequence[str]) -> list[float | None]:
    """Convert texts to numbers; None for texts that are not numbers."""

    def read(text: str) -> float | None:
        try:
            return float(text.replace(",", "."))
        except ValueError:
            return None

    return [read(text) for text in texts]


def _is_same(cell: str, wanted: str) -> bool:
    """Compare as text or as numbers: 3 and 3.0 are the same board."""
    if cell == wanted.strip():
        return True
    own, other = _numbers([cell, wanted])
    return own is not None and own == other


def _as_text(cell: Any) -> str:
    """Format a cell as a CSV file would; MATLAB wraps each text of a cell array."""
    while isinstance(cell, np.ndarray):
        cell = cell.reshape(-1)[0] if cell.size else ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return "" if cell is None else str(cell).strip()


def _list_some(texts: Sequence[str]) -> str:
    return ",".join(sorted(set(texts))[:MAX_CLASSES_SHOWN])


def _describe(where: Mapping[str, str]) -> str:
    return f"with {' and '.join(f'{name}={value}' for name, value in where.items())} " if where else ""


def _span(names: Sequence[str]) -> str:
    return f"{len(names)} columns {names[0]} to {names[-1]}"


def _summarise(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return f"{shown} ({len(names) - MAX_NAMES_SHOWN} more)" if len(names) > MAX_NAMES_SHOWN else shown
