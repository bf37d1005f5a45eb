"""Exported files that hold a computation besides weights: `torch_export` and `onnx`, their use and quantization.

If a model can be in neither format, the reason is given. An exported file is opened as `load.py` does it, without
running that file. Quantization stores weights, and for `dynamic_int8` the numbers between layers too, in 8 or 4 bits.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from hpc_trainer.config.packages import import_torchao
from hpc_trainer.deploy.trained import read_weights
from hpc_trainer.errors import ConfigError
from hpc_trainer.training.ability import Quantization

INPUTS, OUTPUTS = "inputs", "outputs"
_TRACED = 2  # samples: with one alone torch takes the batch for a constant
_FRAMES = 12
_LARGEST_ONNX = 2**31 - 2**24
_NODE = re.compile(r"translating node %(\w+)")
_OP = re.compile(r"No ONNX function found for <OpOverload\(op='([\w:.]+)'")
_FIXED = re.compile(r"marked batch as dynamic but your code specialized it to be a constant \((\d+)\)")


def trace(model: nn.Module, inputs: torch.Tensor, to: str) -> ExportedProgram:
    """Return the graph that torch.export makes of `model` for a batch of any size.

    Args:
        inputs: a batch of the data, [batch, ..].
        to: the format, for messages.

    Raises:
        ConfigError: the model has no such graph; the message names the module, its file and line, and the fix.
    """
    few = inputs[:_TRACED] if len(inputs) >= _TRACED else inputs.repeat(_TRACED, *[1] * (inputs.ndim - 1))
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(model, (few.contiguous(),), dynamic_shapes=({0: Dim("batch", min=1)},))
    except Exception as error:  # an error of the model's own code, or any of torch's
        raise ConfigError(_untraceable(model, error, to)) from error


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write a file for torch.export.load, without the code lines of each node: these name folders of this machine."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    with quiet():
        torch.export.save(program, path)


def read_program(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the program that `write_program` wrote.

    The file must be the user's own: torch evaluates expressions in it, and its graph may call any function of torch
    (docs/decisions/0045).
    """
    with quiet():
        return torch.export.load(path).module()


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write one file, with the weights in it, of less than 2 GiB, the largest size of a message of ONNX.

    Raises:
        ConfigError: the file would be larger, or an operation has no form in ONNX. Then the message names the
            operation, its place in the model, and the fix.
    """
    import onnx

    size = sum(tensor.numel() * tensor.element_size() for tensor in (*program.state_dict.values(),))
    if size > _LARGEST_ONNX:
        raise ConfigError(
            f"--to onnx: the weights are {size / 2**30:.1f} GiB, and an ONNX file that holds its weights must have "
            "less than 2. Use --to torch_export."
        )
    try:
        with quiet():
            made = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=[INPUTS], output_names=[OUTPUTS]
            )
            assert made is not None
    except Exception as error:  # any error of torch or onnxscript
        raise ConfigError(_no_onnx(program, error)) from error
    proto = made.model_proto
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        del node.metadata_props[:]  # its lines of code: longer than the weights of a small model
    onnx.checker.check_model(proto)
    onnx.save(proto, str(path))


def read_onnx(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that runs the file in onnxruntime on the CPU, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3  # errors only: notes on optimisations help nobody
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.from_numpy(session.run([OUTPUTS], {INPUTS: inputs.contiguous().numpy()})[0])
        return outputs

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of torch and other libraries about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _untraceable(model: nn.Module, error: Exception, to: str) -> str:
    what = f"--to {to}: {type(model).__name__} has no graph of its own that torch.export could find"
    use = "or use --to safetensors, which holds only weights."
    fixed = _FIXED.search(str(error))
    if fixed:
        return (
            f"{what}: its code fixes the size of the batch ({fixed[1]} here). Let forward ask for inputs.shape[0] (or "
            f"-1 in view and reshape), {use}"
        )
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    place = _place_in(model, error)
    return (
        f"{what}{f', at {place}' if place else ''}: {type(error).__name__}: {said} A graph has no branch or loop that "
        f"depends on the values of tensors, and calls only torch: write it with torch.where and the like, {use}"
    )


def _place_in(model: nn.Module, error: Exception) -> str:
    """Return the innermost line of a module of `model` that was running: `blocks.2 (Block), FILE:LINE: CODE`."""
    names = {id(module): name for name, module in model.named_modules()}
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names and not frame.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
            where = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            name = names[id(owner)] or "the model"
            place = f"{name} ({type(owner).__name__}), {where.filename}:{line}: {where.line}"
    return place


def _no_onnx(program: ExportedProgram, error: Exception) -> str:
    causes = [str(cause) for cause in _causes(error)]
    text = "\n".join(causes)
    op, node = _OP.search(text), _NODE.search(text)
    place = _place_of(program, node[1]) if node else ""
    said = f"ONNX has no {op[1]}" if op else next((line for line in causes[-1].splitlines() if line), "")
    return (
        f"--to onnx: {said}{f', which {place} uses' if place else ''}. Write it with operations that ONNX has "
        "(torch.onnx's list of supported operators), or use --to torch_export."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_FRAMES):
        if error is None:
            return
        yield error
        error = error.__cause__


def _place_of(program: ExportedProgram, name: str) -> str:
    """Return the place in the model of the graph's node `name`: `inner (my_net.Inner), FILE, line 4, in forward`."""
    # torch.onnx decomposes operations first: the node may be a part of an operation with a longer name.
    for node in sorted(program.graph.nodes, key=lambda node: node.name != name):
        if name not in node.name:
            continue
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        owner, kind = [("", ""), *stack.values()][-1]
        lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
        files = [line for line in lines if line.startswith("File ")]
        where = files[-1].replace('"', "").removeprefix("File ") if files else ""
        return f"{owner or 'the model'} ({kind}){f', {where}' if where else ''}"
    return ""


class Opened(nn.Module):
    """Module around a function that runs an exported file. It has no trainable weights, and only one mode."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._run = (run,)  # no submodule: a graph refuses a change of its mode

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs for a batch of inputs."""
        return self._run[0](inputs)


def open_file(path: Path, to: str, quantize: str | None, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model in the file.

    Args:
        build: returns the model, with any weights, that a file of weights alone is loaded into.
    """
    if to == "onnx":
        return Opened(read_onnx(path))
    if quantize is not None:
        import_torchao()
    if to == "torch_export":
        return Opened(read_program(path))
    model = build()
    model.load_state_dict(read_weights(path), assign=quantize is not None)
    return model.eval().requires_grad_(False)


IN_THE_FILE = {"onnx": ("dynamic_int8", "int4")}
"""Kinds of quantization, by format, that are applied to the written file; others are applied to the model before."""
_GROUP = 32  # weights of 4 bits that share a scale


def quantize_model(model: nn.Module, kind: str, trained: Quantization | None = None) -> int:
    """Quantize the linear layers of `model` by torchao, in place, and return how many weights have 8 bits now.

    Args:
        trained: how training rounded layers to `kind`, so that they get the same numbers; None if it did not.

    Raises:
        ConfigError: the model has no linear layer.
    """
    import_torchao()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and (trained is None or name in trained.layers)
    }
    if not chosen:
        raise ConfigError(
            f"--quantize {kind}: {type(model).__name__} has no linear layer, and torchao takes no others. Use "
            "--to onnx --quantize dynamic_int8, which takes convolutions too, or leave --quantize out."
        )
    if trained is not None:
        config = trained.config
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
