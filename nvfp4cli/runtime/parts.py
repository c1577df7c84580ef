"""A causal language model whose decoder layers are in memory one at a time.

transformers builds the model and loads its weights, so that the modules, their renamings and their
arithmetic are those every user of the model gets. What is not wanted of it is emptied while it is
constructed on the meta device: it keeps its modules and attributes, without parameters.

The inputs of a decoder layer other than the hidden states, such as positions and masks, depend on
nothing but the shape of the tokens. They are recorded once, in a forward pass through empty layers.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
)

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.runtime.cache import parameter
from nvfp4cli.runtime.matrices import decoder_layers
from nvfp4cli.runtime.model import LazyTensor, configured

Tensors = Mapping[str, Callable[[], Tensor]]


# Of one layer, by the shape [B, T] of the tokens: what it is called with beside hidden states.
Calls = dict[tuple[int, ...], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class _Form:
    """tuples: whether the model's layers put out tuples, the hidden states first."""

    tuples: bool = False

    def of(self, hidden: Tensor) -> Any:
        return (hidden,) if self.tuples else hidden


class Block(Protocol):
    """A part of a model, to be called with hidden states alone: [B, T, H] -> [B, T, H or V].

    module: in eval mode, without gradients; its weights may be changed in place.
    """

    @property
    def module(self) -> nn.Module: ...

    def __call__(self, hidden: Tensor, cache: Cache | None = None) -> Tensor: ...


@dataclass(frozen=True)
class _Layer:
    """A decoder layer."""

    module: nn.Module
    calls: Calls
    form: _Form

    def __call__(self, hidden: Tensor, cache: Cache | None = None) -> Tensor:
        arguments, keywords = self.calls[tuple(hidden.shape[:2])]
        given = (hidden, *arguments)
        if cache is not None:
            bound = inspect.signature(self.module.forward).bind_partial(*given, **keywords)
            bound.arguments[parameter(self.module.forward)] = cache
            given, keywords = bound.args, bound.kwargs
        output = self.module(*given, **keywords)
        self.form.tuples = isinstance(output, tuple)
        return output[0] if self.form.tuples else output


class Parts:
    """The parts of one model: what comes before its layers, the layers, what follows them.

    config: a config.json; its quantization_config is ignored. tensors: names of a checkpoint ->
    how each is read, all of the unquantised model's.

    Raises UnsupportedError for a model that transformers does not know as a language model, and
    CheckpointError for tensors that are missing or of the wrong shape.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._config, self._class = _architecture(config)
        self._device = device
        self._manner = {
            "dtype": dtype,
            "attn_implementation": "sdpa" if self._class._supports_sdpa else "eager",
            "experts_implementation": "eager",
        }
        with torch.device("meta"):
            model = self._class._from_config(self._config, **self._manner)
        self._prefix, count = decoder_layers(model)
        self._calls: list[Calls] = [{} for _ in range(count)]
        # Some are filled by the initialisation of the model around the layers, which runs in
        # `enter` alone.
        self._buffers: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self._form = _Form()
        self._layers: list[dict[str, Callable[[], Tensor]]] = [{} for _ in range(count)]
        self._others: dict[str, Callable[[], Tensor]] = {}
        for name, read in tensors.items():
            number = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name)
            if number and not _outside(name):
                if int(number[1]) < count:
                    self._layers[int(number[1])][name] = read
            else:
                self._others[name] = read

    def __len__(self) -> int:
        return len(self._calls)

    @torch.no_grad()
    def enter(self, batches: Iterable[Tensor]) -> list[Tensor]:
        """What the first layer is given: int64 tokens [B, T] -> hidden states [B, T, H]."""
        model = self._part(self._others, self._within_layers)
        recorder = _Recorder(self._calls, self._form)
        for number, layer in enumerate(model.get_submodule(self._prefix).children()):
            layer.forward = recorder.stands_for(number)
            self._buffers[number] = dict(_computed(layer))
        found = []
        for tokens in batches:
            given = tokens.to(self._device)
            with suppress(_Recorded):
                try:
                    model(input_ids=given, use_cache=False)
                except _Misread:
                    self._form.tuples = True
                    model(input_ids=given, use_cache=False)
            found.append(recorder.first())
        return found

    def layer(self, number: int) -> Block:
        """A decoder layer, read anew."""
        prefix = f"{self._prefix}.{number}"
        model = self._part(
            self._layers[number], lambda name: not f"{name}.".startswith(f"{prefix}.")
        )
        layer = model.get_submodule(prefix)
        for name, buffer in _computed(layer):
            buffer.copy_(self._buffers[number][name])
        return _Layer(layer, self._calls[number], self._form)

    def tail(self) -> Block:
        """What follows the last layer: hidden states [B, T, H] -> logits [B, T, V]."""
        model = self._part(self._others, self._within_layers)
        return _Tail(model, self._prefix, self._form)

    def _within_layers(self, name: str) -> bool:
        return name.startswith(f"{self._prefix}.")

    def _part(self, tensors: Tensors, unwanted: Callable[[str], bool]) -> PreTrainedModel:
        """The model with weights in its wanted modules, and none in the others."""

        def construct(model: PreTrainedModel, *arguments: Any, **keywords: Any) -> None:
            self._class.__init__(model, *arguments, **keywords)
            _empty(model, unwanted)

        part: Any = type(self._class.__name__, (self._class,), {"__init__": construct})
        part.__module__ = self._class.__module__
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # the faults it reports are raised below
        lock = threading.Lock()
        model, report = part.from_pretrained(
            None,
            config=self._config,
            state_dict={name: LazyTensor(read, lock) for name, read in tensors.items()},
            device_map={"": self._device},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **self._manner,
        )
        wrong = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
        if wrong := [name for name in wrong if not unwanted(name)]:
            raise CheckpointError(
                f"{sorted(wrong)[0]} is missing or of another shape than transformers "
                f"{transformers.__version__} expects: compare the checkpoint with its config.json."
            )
        return model.eval().requires_grad_(False)


class _Recorded(Exception):
    """A forward pass has reached the last layer."""


class _Misread(Exception):
    """The model has taken hidden states for a tuple that holds them."""


class _Recorder:
    """Empty layers that note what they are called with and hand the hidden states on."""

    def __init__(self, calls: list[Calls], form: _Form) -> None:
        self._calls, self._form = calls, form
        self._first: Tensor | None = None

    def stands_for(self, number: int) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            hidden = arguments[0] if arguments else keywords.pop("hidden_states")
            if number == 0:
                self._first = hidden
            first = self.first()
            if hidden.ndim != first.ndim:
                raise _Misread
            self._calls[number].setdefault(tuple(first.shape[:2]), (arguments[1:], keywords))
            if number + 1 == len(self._calls):
                raise _Recorded
            return self._form.of(first)

        return forward

    def first(self) -> Tensor:
        assert self._first is not None
        return self._first


class _Tail:
    """The model behind its layers, of which the last puts out what is asked for."""

    def __init__(self, model: PreTrainedModel, prefix: str, form: _Form) -> None:
        self.module = model
        self._form = form
        self._hidden: Tensor | None = None
        for layer in model.get_submodule(prefix).children():
            layer.forward = self._feed

    def _feed(self, *arguments: Any, **keywords: Any) -> Any:
        assert self._hidden is not None
        return self._form.of(self._hidden)

    def __call__(self, hidden: Tensor, cache: Cache | None = None) -> Tensor:
        self._hidden = hidden
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.module(input_ids=tokens, use_cache=False).logits
        return logits


def _architecture(values: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    config = configured(values, "the model")
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            model_class = mapping[type(config)]
            # Of some wrappers this is the language model alone, made from its own part.
            alone = model_class.config_class is config.sub_configs.get("text_config")
            return config.get_text_config() if alone else config, model_class
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no language model of the type "
        f"{config.model_type!r}, so that no text can be run through it: use a method that needs no "
        "calibration (--method mse)."
    )


def _outside(name: str) -> bool:
    """Layers of a vision tower."""
    return re.search(r"vision|visual|image", name) is not None


def _computed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are no part of a checkpoint."""
    for prefix, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            if (buffer := owner._buffers[name]) is not None:
                yield f"{prefix}.{name}", buffer


def _empty(model: PreTrainedModel, unwanted: Callable[[str], bool]) -> None:
    """Take the parameters of unwanted modules away, and with them all ties to them."""
    for name, module in model.named_modules():
        if unwanted(name):
            # Buffers stay: they are small, and the initialisation of other modules fills them.
            module._parameters.update(dict.fromkeys(module._parameters))
            module._is_hf_initialized = True  # nothing is left to initialise
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if {target, source} <= held
    }
