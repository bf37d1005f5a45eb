"""Quantization to 8 or 4 bits of weights, and for `dynamic_int8` of the numbers between layers too.

torchao quantizes files that torch runs, and `int8` in ONNX, where its graph has a form. onnxruntime quantizes the other
two kinds in ONNX: torchao's dynamic quantization has no form there, and its 4 bits take a byte each on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.features.compress import QatConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.qat.rounding import convert_config, import_torchao, layers_to_round
from hpc_trainer.worker.deploy.graphs import quiet

IN_THE_FILE = {"onnx": ("dynamic_int8", "int4")}
"""Kinds of quantization, by format, that are applied to the written file; others are applied to the model before."""
_GROUP = 32  # weights of 4 bits that share a scale


def quantize_model(model: nn.Module, kind: str, qat: QatConfig) -> int:
    """Quantize the linear layers of `model` by torchao, in place, and return how many weights have 8 bits now.

    Args:
        qat: section of the run. If training rounded to `kind`, the same layers get the numbers that it rounded to.

    Raises:
        ConfigError: the model has no linear layer.
    """
    import_torchao()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    trained_for = qat.to.name == kind
    names = set(layers_to_round(model, qat)[0]) if trained_for else None
    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and (names is None or name in names)
    }
    if not chosen:
        raise ConfigError(
            f"--quantize {kind}: {type(model).__name__} has no linear layer, and torchao takes no others. Use "
            "--to onnx --quantize dynamic_int8, which takes convolutions too, or leave --quantize out."
        )
    if trained_for:
        config = convert_config(qat)
    else:
        config = Int8DynamicActivationInt8WeightConfig() if kind == "dynamic_int8" else Int8WeightOnlyConfig()
    with quiet():
        quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return sum(layer.weight.numel() for layer in chosen.values() if type(layer.weight) is not nn.Parameter)


def quantize_file(path: Path, kind: str) -> int:
    """Quantize the ONNX file at `path` by onnxruntime, in place, and return how many weights have 8 or 4 bits now.

    Raises:
        ConfigError: nothing in the file can be quantized.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = path.with_suffix(".quantized")
    source = onnx.load(str(path))
    if kind == "int4":
        _to_4_bits(source, made)
    else:
        has_conv = any(node.op_type == "Conv" for node in source.graph.node)
        with quiet():
            # Products with signed weights are twice as fast, but convolutions with them are four times as slow.
            weights = QuantType.QUInt8 if has_conv else QuantType.QInt8
            quantize_dynamic(source, str(made), weight_type=weights, per_channel=True)
    count = _num_small(onnx.load(str(made)))
    if not count:
        made.unlink()
        raise ConfigError(
            f"--quantize {kind}: the model has no weights that onnxruntime can take in so few bits (those of linear "
            f"layers{', and of convolutions' if kind == 'dynamic_int8' else ''}). Leave --quantize out."
        )
    made.replace(path)
    return count


def _to_4_bits(source: Any, made: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = ONNXModel(source)
    with quiet():
        model.replace_gemm_with_matmul()  # the quantizer takes products of two matrices alone
        quantizer = MatMulNBitsQuantizer(model.model, bits=4, block_size=_GROUP, is_symmetric=True)
        quantizer.process()
    quantizer.model.save_model_to_file(str(made), use_external_data_format=False)


def _num_small(model: Any) -> int:
    """Return the number of weights in matrices of 8 or 4 bits."""
    import onnx

    small = {onnx.TensorProto.INT8: 1, onnx.TensorProto.UINT8: 1}
    packed = {node.input[1] for node in model.graph.node if node.op_type == "MatMulNBits"}
    return sum(
        torch.Size(tensor.dims).numel() * (2 if tensor.name in packed else 1)
        for tensor in model.graph.initializer
        if tensor.data_type in small and len(tensor.dims) > 1
    )
