"""Importing this registers each of attn.c's normalizers with transformers, as an attention implementation
"attn_c:NAME" and the mask that it needs:

    import attn_c.transformers
    model.set_attn_implementation("attn_c:softmax1")

register() adds normalizers with overrides, attach() gives a model learned scalars."""
import functools

import torch
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4):
    raise ImportError(f"attn_c.transformers needs transformers 5.4 or newer, found {transformers.__version__}; "
                      "pip install --upgrade transformers")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from . import PRESETS, Normalizer, attention
from .cuda import traits

# What models pass to their attention that would change the result, unless it has one of these values; and the tensors
# that do not. Other tensors, such as the indices of sparse attention, are rejected.
NEUTRAL = {"dropout": (0, 0.0, None), "output_attentions": (False, None)}
UNSUPPORTED = ("softcap",)
HARMLESS = ("position_ids", "cache_position", "num_items_in_batch", "token_type_ids", "input_ids")
OTHER = "use another attn_implementation for this model"
AT_THE_END = "padding at the end under a normalizer that depends on the length of each text"
COMPILED = ". Under torch.compile, transformers takes sequences for packed unless attention_mask or a cache is passed"


def reject(name, found, remedy):
    raise ValueError(f"attn_c: {name} is not supported, found {found}; {remedy}")


def check_arguments(module, is_causal=None, **arguments):
    """A module that is not causal has an attribute that says so; its calls may not."""
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reject("attention that is not causal", f"is_causal=False in {type(module).__name__}", OTHER)
    for name, value in arguments.items():
        if name in UNSUPPORTED and value is not None or isinstance(value, torch.Tensor) and name not in HARMLESS:
            reject(name, describe(value), OTHER)
    for name, neutral in NEUTRAL.items():
        if name in arguments and arguments[name] not in neutral:
            reject(name, arguments[name], f"set it to {neutral[0]}, or {OTHER}")


def describe(value):
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


# ---- the mask

def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
         attention_mask=None, local_size=None, config=None, reads_length=False, **_):
    """The number of padding tokens at the beginning of each sequence (B), or None if there are none. Not every model
    passes sliding_window to its attention, so the mask of a window that hides something says so: it has an element
    more, or none without padding. kv_offset is how many tokens a cache has dropped because of its window. reads_length:
    does the normalizer depend on the length of each text?"""
    parts = mask_names(mask_function)
    in_window = "sliding_window_overlay" in parts and local_size < kv_offset + kv_length
    if parts := [name for name in parts if name != "sliding_window_overlay"]:
        reject("a mask other than a causal one with padding", " and ".join(parts),
               OTHER + (COMPILED if "packed_sequence_mask_function" in parts else ""))
    if attention_mask is not None and not isinstance(q_offset, torch.Tensor):       # one would be of a fixed cache
        check_length(attention_mask, q_offset + q_length)
    if isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        reject("a cache whose length is fixed", f"{kv_length} keys for {q_length} queries from position {q_offset} on",
               "use transformers' DynamicCache")
    if kv_offset != 0 and reads_length:
        reject("a cache that drops tokens under a normalizer that depends on the length of each text",
               f"{kv_offset} dropped tokens", "pass use_cache=False")
    padding = padding_of(attention_mask, kv_offset, kv_length, reads_length)
    if not in_window:
        return padding
    return torch.empty(0, dtype=torch.int32) if padding is None else torch.cat([padding, padding[:1]])


def padding_of(attention_mask, kv_offset, kv_length, reads_length):
    if attention_mask is None:
        return None
    seen = attention_mask[:, kv_offset:kv_offset + kv_length].bool()
    if torch.compiler.is_compiling():
        torch._assert_async((texts_in(seen) <= 1).all(), "attn_c: expected an attention_mask with padding at the "
                            "beginning or the end, found padding between tokens")
        if reads_length:
            torch._assert_async(seen[:, -1].all(), f"attn_c: {AT_THE_END} is not supported; pad at the beginning")
    elif seen.all():
        return None
    else:
        check_padding(seen, reads_length)
    # A sequence with padding at its end sees it only from there, so only padding at the beginning counts.
    return seen.int().argmax(-1).int()


def mask_names(function):
    """The names of the functions of which a mask is made, without the causal one."""
    if function is causal_mask_function:
        return []
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [x for contents in held if isinstance(contents, tuple) for x in contents if callable(x)]
    return [name for part in parts for name in mask_names(part)] if parts else [function.__qualname__.split(".")[0]]


def check_length(attention_mask, keys):
    """A longer mask is cut off. transformers takes what is missing in a shorter one for padding."""
    if attention_mask.shape[1] < keys:
        raise ValueError(f"attn_c: expected an attention_mask over all {keys} keys, found {attention_mask.shape[1]}; "
                         "pass one for the tokens in the cache and the new ones")


def texts_in(seen):
    """How many runs of tokens without padding each sequence has."""
    return (torch.diff(seen.int(), dim=-1) == 1).sum(-1) + seen[:, 0]


def check_padding(seen, reads_length):
    """Each sequence must be padding, then tokens, then padding. T in the normalizers that read it would include padding
    at the end."""
    holes = (texts_in(seen) > 1).nonzero().flatten().tolist()
    if holes:
        reject("an attention_mask with padding between tokens", f"it in sequences {holes}",
               "pad at the beginning or the end")
    ends = (~seen[:, -1]).nonzero().flatten().tolist()
    if reads_length and ends:
        reject(AT_THE_END, f"it in sequences {ends}", "pad at the beginning")


# ---- attention

def registered(normalizer):
    """The attention function of a normalizer, as transformers calls it."""

    def forward(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **arguments):
        check_arguments(module, **arguments)
        if attention_mask is not None and attention_mask.ndim != 1:
            reject("a prepared mask", describe(attention_mask), "pass attention_mask as (batch, tokens), 0 for padding")
        sliding_window = sliding_window or None     # 0: none, as in Qwen2-MoE
        if attention_mask is not None and len(attention_mask) != len(key):      # see mask()
            if sliding_window is None:
                reject("a sliding window of which only the mask tells", f"it in {type(module).__name__}", OTHER)
            attention_mask = attention_mask[:-1] if len(attention_mask) else None
        elif sliding_window and sliding_window < key.shape[2]:
            reject("a sliding window without its mask", f"sliding_window={sliding_window} for {key.shape[2]} keys",
                   OTHER)
        own = getattr(module, "normalizer", None)
        if isinstance(own, Normalizer):
            if own.normalizer != normalizer:
                raise ValueError(f"attn_c: this layer has the scalars of {own.normalizer}, but attn_implementation is "
                                 f"attn_c:{normalizer}; attach() the normalizer to use, or detach()")
            out = own(query, key, value, start=attention_mask, scaling=scaling, window=sliding_window)
        else:
            out = attention(query, key, value, normalizer, seq_len=trained_length(module), start=attention_mask,
                            scaling=scaling, window=sliding_window)
        return out.transpose(1, 2), None

    return forward


def trained_length(module):
    config = getattr(module, "config", None)
    return getattr(config, "max_position_embeddings", None)


def register(normalizer):
    """Registers a normalizer, such as "softmax+post=reweight:3", and returns the name of its implementation."""
    reads_length = traits(normalizer, 2)[2]      # or an error for a name that is not one
    attention_name = f"attn_c:{normalizer}"
    AttentionInterface.register(attention_name, registered(normalizer))
    AttentionMaskInterface.register(attention_name, functools.partial(mask, reads_length=reads_length))
    return attention_name


for preset in PRESETS:
    register(preset)


# ---- learned scalars

def attention_layers(model):
    """The modules that call attention functions."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")
              and hasattr(module, "o_proj")]
    if not layers:
        raise ValueError(f"attn_c: {type(model).__name__}: expected attention layers with q_proj, o_proj and "
                         "layer_idx, found none; give each attention module a Normalizer as `normalizer`")
    return layers


def window_of(layer):
    """Mistral's layers have none of their own, but their configuration does."""
    return getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))


def attach(model, normalizer, seq_len):
    """Gives each attention layer of a model a Normalizer, `self_attn.normalizer`, whose scalars are trained and saved
    with the model, and selects the implementation. p of scale=pn is one parameter for the whole model. Scalars of an
    earlier attach() are replaced. An error leaves the model as it was."""
    layers = attention_layers(model)
    # An error in the arguments is found here, before the model changes.
    normalizers = [Normalizer(normalizer, layer.config.num_attention_heads, seq_len,
                              device=next(layer.parameters()).device, window=window_of(layer)) for layer in layers]
    implementation = register(normalizer)
    detach(model)
    for layer, own in zip(layers, normalizers):
        layer.normalizer = own
        if "attn_pn" in own.names:
            layer.normalizer.attn_pn = layers[0].normalizer.attn_pn
    names = [f"{name}.normalizer.attn_pn" for name, layer in model.named_modules() if layer in layers]
    if "attn_pn" in normalizers[0].names:     # or save_pretrained() rejects the shared parameter
        model._tied_weights_keys = (model._tied_weights_keys or {}) | dict.fromkeys(names[1:], names[0])
    # For attn.c's programs, which load what save_pretrained() writes; transformers ignores the key.
    length, parameters = normalizers[0].seq_len, normalizers[0].parameters()
    model.config.attention_normalizer = {"name": normalizer} | ({"seq_len": length} if length else {}) | (
        {} if all(parameter.requires_grad for parameter in parameters) else {"fixed": True})
    model.set_attn_implementation(implementation)


def detach(model):
    """Removes the scalars of attach(). The normalizer stays, with its initial scalars; model.set_attn_implementation()
    selects another."""
    for layer in attention_layers(model):
        if isinstance(getattr(layer, "normalizer", None), Normalizer):
            del layer.normalizer
    vars(model.config).pop("attention_normalizer", None)
    model._tied_weights_keys = {name: source for name, source in (model._tied_weights_keys or {}).items()
                                if not name.endswith(".normalizer.attn_pn")}
