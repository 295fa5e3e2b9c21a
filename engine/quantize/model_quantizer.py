"""Quantizes a model directory: reads the dense checkpoint one matrix at a time, and writes a new directory.

Only the projections of layers are quantized; embeddings, output head, norms and biases stay as they are stored. With
calibration a layer is measured with the results of the layers before it as they are after rounding, so that later
layers make up for what earlier ones lose.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix
from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from engine.model.parameters import LAYERS, expected_shapes, parameter_table
from engine.model.spec import ModelSpec
from engine.quantize.calibration import CalibratedModel, InputStatistics
from engine.quantize.gptq import correction_factor, round_with_corrections
from engine.quantize.rounding import round_groups, round_rows
from engine.quantize.safetensors_writer import DeclaredTensor, SafetensorsWriter
from engine.quantize.settings import Method, QuantizationSettings, stored_tensors
from engine.quantize.smoothing import fold, norm_readers, smoothing_factors
from tandem.errors import ConfigError

_CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_PROJECTIONS = ("qkv", "output", "gate_up", "down")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
"""Endings of files that hold the dense weights, in whatever form, or say where they are."""
QuantizeProgress = Callable[[int, int], None]
"""Called with the numbers of matrices done and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """What has been written."""

    num_quantized: int
    """Number of matrices."""
    dense: tuple[str, ...]
    """Modules of layers that stay as they were, as groups do not divide their columns."""
    old_bytes: int
    """Bytes of all tensors before."""
    new_bytes: int


def quantize_model(
    model: Path,
    out: Path,
    settings: QuantizationSettings,
    *,
    chunks: Sequence[Sequence[int]] = (),
    progress: QuantizeProgress | None = None,
) -> QuantizedModel:
    """Write the quantized form of the model directory `model` to `out`, which appears once it is complete.

    `chunks`: token ids of examples, for methods that are calibrated. Raises ConfigError for a model that cannot be read
    or is quantized already, and where `out` has files or cannot be written.
    """
    directory = ModelDirectory(model)
    spec = _dense_spec(directory, model)
    if settings.method is Method.SMOOTH and not any(norm_readers(layer) for layer in spec.layers):
        raise ConfigError(f"--method smooth: {spec.architecture} has no norms before its projections; use round")
    others = [directory.resolve(name) for name in _other_files(directory)]
    try:
        with _appearing(out) as folder, Checkpoint(directory) as checkpoint, torch.inference_mode():
            job = _Job(spec, checkpoint, settings, chunks, progress)
            with SafetensorsWriter(folder, job.declared()) as writer:
                job.run(writer)
            raw = directory.read_json(_CONFIG)
            kept = {name: value for name, value in (raw.get(_QUANTIZATION) or {}).items() if name == "kv_cache_scheme"}
            raw[_QUANTIZATION] = settings.quantization_config(job.dense) | kept
            (folder / _CONFIG).write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            for path in others:
                shutil.copyfile(path, folder / path.name)
            return QuantizedModel(
                num_quantized=len(job.quantized),
                dense=tuple(job.dense),
                old_bytes=checkpoint.size_bytes,
                new_bytes=writer.size_bytes,
            )
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror or type(error).__name__}") from None


def _dense_spec(directory: ModelDirectory, model: Path) -> ModelSpec:
    if (gguf := directory.gguf_path()) is not None:
        raise ConfigError(f"{model}: {gguf.name} is a GGUF file: only safetensors can be quantized")
    spec = load_model_config(model)
    if spec.weight_format is not None:
        raise ConfigError(f"{model} is quantized already ({spec.weight_format}): name the model that it was made of")
    if spec.moe is not None:
        raise ConfigError(
            f"{model}: {spec.architecture} has mixtures of experts, which are not quantized to files; "
            "engine.quantization quantizes them while they are loaded"
        )
    return spec


def _other_files(directory: ModelDirectory) -> list[str]:
    """Names of files that are copied: tokenizer, chat template, defaults of sampling, licence; not folders."""
    names = [name for name in directory.names("") if name != _CONFIG and not name.endswith(_WEIGHTS)]
    return [name for name in names if not (directory.root / name).is_dir()]


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new directory that gets the name `out` when all has gone well, and is removed otherwise."""
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory")
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerMatrix:
    """A stored matrix of a layer."""

    name: str
    projection: str
    """The parameter table's name in a layer."""
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


class _Job:
    """One model on its way from a checkpoint to a writer."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        settings: QuantizationSettings,
        chunks: Sequence[Sequence[int]],
        progress: QuantizeProgress | None,
    ) -> None:
        """Raises ConfigError for a checkpoint that lacks tensors, and where nothing can be quantized."""
        self._spec = spec
        self._checkpoint = checkpoint
        self._settings = settings
        self._progress = progress or (lambda _done, _total: None)
        for name, shape in expected_shapes(spec).items():
            checkpoint.require(name, shape)
        self._table = parameter_table(spec)
        self._layers = [self._matrices(index) for index in range(spec.num_layers)]
        matrices = {matrix.name: matrix for layer in self._layers for matrix in layer}
        self.quantized = {name: one for name, one in matrices.items() if settings.fits(one.shape)}
        """Matrices that get another form, by name."""
        self.dense = [one.module for name, one in matrices.items() if name not in self.quantized]
        """Modules of the others."""
        if not self.quantized:
            raise ConfigError(f"no matrix has columns that groups of {settings.group_size} divide")
        self._calibrated = None
        if settings.method is not Method.ROUND:
            self._calibrated = CalibratedModel(spec, checkpoint, chunks)
        self._num_done = 0
        self._written: set[str] = set()
        """Names of the checkpoint's tensors that are in the new one, in whatever form."""

    def declared(self) -> Iterator[DeclaredTensor]:
        """All tensors of the new checkpoint, those of a layer together."""
        entries = self._checkpoint.entries
        for name in sorted(entries, key=_in_layers):
            if (matrix := self.quantized.get(name)) is None:
                yield DeclaredTensor(name=name, dtype=entries[name].dtype, shape=entries[name].shape)
                continue
            for part, (dtype, shape) in self._settings.stored_parts(matrix.shape).items():
                yield DeclaredTensor(name=f"{matrix.module}.{part}", dtype=dtype, shape=shape)

    def run(self, writer: SafetensorsWriter) -> None:
        """Quantize and write all tensors. Raises ConfigError for values that are not finite."""
        for index in range(self._spec.num_layers):
            replaced = self._write_layer(index, writer)
            if self._calibrated is not None and index + 1 < self._spec.num_layers:
                self._calibrated.advance(index, replaced)
        for name in sorted(self._checkpoint.names - self._written):
            writer.write(name, self._checkpoint.tensor(name))
            self._checkpoint.forget(name)

    def _write_layer(self, index: int, writer: SafetensorsWriter) -> dict[str, Tensor]:
        """Quantize and write a layer's matrices.

        Returns, with calibration, the tensors that differ from the checkpoint's, by their names.
        """
        statistics: dict[str, InputStatistics] = {}
        if self._calibrated is not None:
            statistics = self._calibrated.measure(index, with_gram=self._settings.method is Method.GPTQ)
        replaced, factors = self._smoothed(index, statistics)
        for name, tensor in replaced.items():
            writer.write(name, tensor)
            self._written.add(name)
        for projection in _PROJECTIONS:
            matrices = [one for one in self._layers[index] if one.projection == projection]
            rounding = self._rounding(statistics.pop(projection, None))
            for matrix in (one for one in matrices if one.name in self.quantized):
                weight = self._checkpoint.tensor(matrix.name)
                if projection in factors:
                    weight = weight.float() * factors[projection]
                with _naming(matrix.name):
                    rounded = rounding(weight)
                for part, tensor in stored_tensors(rounded).items():
                    writer.write(f"{matrix.module}.{part}", tensor)
                if self._calibrated is not None:
                    replaced[matrix.name] = rounded.dequantized()
                self._checkpoint.forget(matrix.name)
                self._written.add(matrix.name)
                self._num_done += 1
                self._progress(self._num_done, len(self.quantized))
        return replaced

    def _rounding(self, statistics: InputStatistics | None) -> Callable[[Tensor], GroupIntMatrix | Int8Matrix]:
        """How the matrices of one projection are rounded, whose inputs have these statistics."""
        size = self._settings.group_size
        if size is None:
            return round_rows
        if statistics is None or statistics.gram is None:
            return lambda weight: round_groups(weight, size)
        factor = correction_factor(statistics.gram)
        return lambda weight: round_with_corrections(weight, factor, size)

    def _smoothed(
        self, index: int, statistics: Mapping[str, InputStatistics]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Changed tensors of norms by name, and factors of columns of weights by projection; none but for `smooth`."""
        changed: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        if self._settings.method is not Method.SMOOTH:
            return changed, columns
        for readers in norm_readers(self._spec.layers[index]):
            weights = [
                self._checkpoint.tensor(one.name)
                for one in self._layers[index]
                if one.projection in readers.projections
            ]
            factors = smoothing_factors(statistics[readers.projections[0]].largest, weights)
            key = f"layers.{index}.{readers.norm}"
            parts = [part for end in ("weight", "bias") for part in self._table.get(f"{key}.{end}", ())]
            tensors, applied = fold({part: self._checkpoint.tensor(part.name) for part in parts}, factors)
            changed |= tensors
            columns |= dict.fromkeys(readers.projections, applied)
        return changed, columns

    def _matrices(self, index: int) -> list[_LayerMatrix]:
        """The matrices of a layer; one that several parameters have parts of counts once."""
        parts = {
            part.name: _LayerMatrix(name=part.name, projection=projection, shape=part.shape)
            for projection in _PROJECTIONS
            for part in self._table[f"layers.{index}.{projection}.weight"]
        }
        return list(parts.values())


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the tensor that an error is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"checkpoint: {name} {error}") from None


def _in_layers(name: str) -> tuple[int, str]:
    """Sorts names: those of each layer together, in the order of the layers, after all others."""
    index, _, _ = name.removeprefix(LAYERS).partition(".")
    is_layer = name.startswith(LAYERS) and index.isdecimal()
    return (int(index) if is_layer else -1), name
