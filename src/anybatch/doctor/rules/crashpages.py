"""What is known of torch's own errors: for each name its title and its page."""


def _page(seen: str, why: str, code: str, fine: str = "Never: the script has stopped.") -> str:
    parts = {
        "What is seen": seen, "Why it matters": why,
        "What to change": f"```python\n{code}\n```", "When it is fine": fine,
    }  # fmt: skip
    return "\n".join(f"## {title}\n\n{text}\n" for title, text in parts.items())


# The order gives the codes: append, never insert.
PAGES: dict[str, tuple[str, str]] = {
    "BACKWARD_TWICE_STATE": (
        "A state of an earlier step is still in the graph",
        _page(
            '"Trying to backward through the graph a second time", and the graph of the loss goes on into that of an '
            "earlier step: a hidden state, a memory, a running mean.",
            "The graph of the earlier step was freed by its backward. `retain_graph=True` hides the error and makes "
            "each step longer than the last.",
            "hidden = tuple(state.detach() for state in hidden)   # before each new batch",
        ),
    ),
    "BACKWARD_TWICE": (
        "Two losses share a part of the graph, and backward is called for each",
        _page(
            '"Trying to backward through the graph a second time" within one step.',
            "The first backward frees what the second one needs.",
            "(loss_a + loss_b).backward()                     # one backward for both\n"
            "loss_a.backward(retain_graph=True); loss_b.backward()   # or keep the graph for the second",
        ),
    ),
    "INPLACE_ON_SAVED": (
        "A tensor that the backward needs was changed in place",
        _page(
            '"one of the variables needed for gradient computation has been modified by an inplace operation".',
            "The backward needs the old value. Changed were either the output of an operation (`x += y`, "
            "`x[mask] = 0`, `relu_`), or a parameter: then `optimizer.step()` ran between forward and backward.",
            "x = x + y            # not x += y\nloss.backward()      # all backwards of a forward before\n"
            "optimizer.step()     # the step that changes its parameters",
        ),
    ),
    "LEAF_INPLACE": (
        "A parameter was changed in place with autograd on",
        _page(
            '"a leaf Variable that requires grad is being used in an in-place operation".',
            "Autograd has no place to record a change of a leaf.",
            "with torch.no_grad():\n    layer.weight.mul_(0.5)",
        ),
    ),
    "DEVICE_MISMATCH": (
        "Tensors on different devices meet",
        _page(
            '"Expected all tensors to be on the same device".',
            "Model, inputs, targets and every tensor made in the forward must be on one device. A tensor that is kept "
            "as a plain attribute does not move with `model.to(device)`.",
            "model = model.to(device)                    # before the optimizer is made\n"
            "x, y = x.to(device), y.to(device)           # .to of a tensor returns the moved one\n"
            'self.register_buffer("positions", torch.arange(512))\n'
            "noise = torch.randn(x.shape, device=x.device)",
        ),
    ),
    "DTYPE_MISMATCH": (
        "Tensors of different precisions meet",
        _page(
            '"mat1 and mat2 must have the same dtype" or "expected scalar type".',
            "Often NumPy is the reason: its floats are float64. Or a part of the model is in half precision.",
            "x = torch.from_numpy(array).float()\ny = y.long()                       # classes\n"
            "x = x.to(model.weight.dtype)",
        ),
    ),
    "INFERENCE_TENSOR": (
        "A tensor of inference mode meets autograd",
        _page(
            '"Inference tensors cannot be saved for backward".',
            "What was made under `torch.inference_mode()` can never take part in a graph; what was made under "
            "`torch.no_grad()` can, as a constant.",
            "with torch.no_grad():                # not inference_mode\n    features = encoder(x)\n"
            "features = features.clone()          # or a copy, outside of inference mode",
        ),
    ),
    "EMPTY_OPTIMIZER": (
        "The optimizer was given no parameters",
        _page(
            '"optimizer got an empty parameter list".',
            "The model registers none: its layers lie in a plain list or dictionary, or they are made later, or a "
            "generator was used up by an earlier loop over it.",
            "self.layers = nn.ModuleList(layers)      # not a list\n"
            "optimizer = AdamW(model.parameters())    # after everything has been made",
        ),
    ),
    "NON_LEAF_OPTIMIZED": (
        "The optimizer was given a computed tensor",
        _page(
            '"can\'t optimize a non-leaf Tensor".',
            "A tensor that came out of an operation (`.to(device)`, `* 0.1`, `.reshape`) is no leaf: its gradient goes "
            "on to where it came from.",
            "w = torch.randn(3, device=device).mul_(0.1).requires_grad_()   # last of all\n"
            "w = nn.Parameter(0.1 * torch.randn(3, device=device))",
        ),
    ),
    "PARAM_IN_TWO_GROUPS": (
        "A parameter is in two groups of one optimizer",
        _page(
            '"some parameters appear in more than one parameter group".',
            "Groups that are made by name overlap, or a tied parameter is in both.",
            "head = {id(p) for p in model.head.parameters()}\n"
            "body = [p for p in model.parameters() if id(p) not in head]",
        ),
    ),
    "UNSCALE_TWICE": (
        "unscale_ was called twice before update",
        _page(
            '"unscale_() has already been called on this optimizer since the last update()".',
            "The gradients would be divided by the scale twice. Accumulating, call it at the last micro-batch.",
            "scaler.unscale_(optimizer)      # once, right before clipping\n"
            "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\nscaler.update()",
        ),
    ),
    "STEP_TWICE_SCALER": (
        "scaler.step was called twice before update",
        _page(
            '"step() has already been called since the last update()", or "unscale_() is being called after step()" '
            "where no `scaler.update()` follows the step.",
            "`scaler.update()` is missing, or stands outside the loop.",
            "scaler.step(optimizer)\nscaler.update()        # once for each step, after the last optimizer",
        ),
    ),
    "STEP_WITHOUT_SCALE": (
        "The scaler steps although no loss was scaled",
        _page(
            '"Attempted step but _scale is None", or no inf checks were recorded.',
            "`scaler.scale(loss)` was never called.",
            "scaler.scale(loss).backward()      # not loss.backward()\nscaler.step(optimizer)",
        ),
    ),
    "SCALER_MISUSED": (
        "A GradScaler is used in the wrong order or on half precision weights",
        _page(
            '"Attempting to unscale FP16 gradients", "No inf checks were recorded", or `unscale_` after `step`.',
            "The scaler belongs to weights in float32 and a computation in float16.",
            'with torch.autocast("cuda", dtype=torch.float16):\n    loss = criterion(model(x), y)   # no model.half()\n'
            "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nscaler.step(optimizer)\nscaler.update()",
        ),
    ),
    "OUT_OF_MEMORY": (
        "The memory is full",
        _page(
            '"CUDA out of memory", or "can\'t allocate memory".',
            "What held the memory is in the evidence: activations of the graph, gradients and optimizer state, or "
            "graphs of earlier steps that are still alive.",
            "step = anybatch.TrainStep(model, optimizer, loss)     # the same gradient, in pieces that fit",
        ),
    ),
    "DDP_READY_TWICE": (
        "DistributedDataParallel saw a parameter twice in one backward",
        _page(
            '"Expected to mark a variable ready only once".',
            "A reentrant checkpoint, or a parameter that is used in two forwards of one step.",
            "checkpoint(block, x, use_reentrant=False)\n"
            "DistributedDataParallel(model, static_graph=True)   # if the graph is the same in every step",
        ),
    ),
    "DDP_UNFINISHED": (
        "DistributedDataParallel waits for gradients that never come",
        _page(
            '"Expected to have finished reduction in the prior iteration".',
            "A parameter took no part in the loss of a step.",
            "DistributedDataParallel(model, find_unused_parameters=True)   # or remove the unused layer",
        ),
    ),
    "BN_ONE_VALUE": (
        "A batch norm got one value per channel",
        _page(
            '"Expected more than 1 value per channel when training".',
            "The variance of one number is not defined. It is mostly the last, short batch of an epoch.",
            "loader = DataLoader(data, batch_size=32, drop_last=True)\nnn.GroupNorm(8, channels)      # or this norm",
        ),
    ),
    "SHAPE_MISMATCH": (
        "Shapes do not fit",
        _page(
            '"mat1 and mat2 shapes cannot be multiplied", "size mismatch", "The size of tensor a must match".',
            "The number of features that a layer gives is not what the next one takes, or the targets have another "
            "shape than the predictions.",
            "x = x.flatten(1)\nself.head = nn.Linear(x.shape[1], classes)     # or nn.LazyLinear(classes)",
        ),
    ),
    "INDEX_OUT_OF_RANGE": (
        "An index is larger than the table, or a class larger than the number of classes",
        _page(
            '"index out of range in self" (embedding) or "Target 10 is out of bounds" (classes).',
            "Tokens must be below `num_embeddings`, classes from 0 to one less than their number, positions below the "
            "greatest length.",
            "self.embedding = nn.Embedding(len(vocabulary), 64)  # special tokens too\ny = y - 1   # classes from 0",
        ),
    ),
    "LOSS_NOT_SCALAR": (
        "backward was called on more than one number",
        _page(
            '"grad can be implicitly created only for scalar outputs".',
            'The loss has one value for each sample: `reduction="none"`, or a mean is missing.',
            "loss.mean().backward()",
        ),
    ),
    "TENSOR_MISUSED": (
        "A tensor with a graph was used as one without, or the other way round",
        _page(
            "`.numpy()` of a tensor that requires grad, `.item()` of several numbers, `detach_()` of a view, "
            "`deepcopy` of a computed tensor, `.grad` that is `None`.",
            "Tensors of a graph and plain numbers are not the same.",
            "array = x.detach().cpu().numpy()\nvalue = loss.mean().item()\nx = x.detach()  # no detach_()",
        ),
    ),
    "STATE_NOT_LOADED": (
        "A saved state does not fit",
        _page(
            '"Error(s) in loading state_dict", "loaded state dict contains a parameter group that doesn\'t match".',
            "The keys or shapes differ: a prefix (`module.`, `_orig_mod.`), other sizes, or other groups.",
            'state = {name.removeprefix("module."): v for name, v in state.items()}\nmodel.load_state_dict(state)',
        ),
    ),
    "SCHED_PAST_END": (
        "A scheduler was stepped more often than it was made for",
        _page(
            '"Tried to step 101 times. The specified number of total steps is 100" (OneCycleLR).',
            "`total_steps` counts calls of `scheduler.step()`.",
            "OneCycleLR(optimizer, max_lr=1e-3, total_steps=epochs * len(loader))   # if stepped for each batch",
        ),
    ),
    "WORKER_DIED": (
        "A worker of a DataLoader ended",
        _page(
            '"DataLoader worker (pid ...) exited unexpectedly" or "is killed by signal".',
            "Mostly memory (also shared memory in a container), or an error in the data set that is hard to see.",
            "DataLoader(data, num_workers=0)       # shows the error itself\n# docker run --shm-size=8g",
        ),
    ),
    "DEVICE_ASSERT": (
        "An assertion failed on the device",
        _page(
            '"CUDA error: device-side assert triggered".',
            "Mostly an index or a class that is out of range. The line in the traceback is a later one, since the GPU "
            "works behind the host.",
            "# CUDA_LAUNCH_BLOCKING=1 python train.py, or once on the CPU\nassert 0 <= y.min() and y.max() < classes",
        ),
    ),
    "CKPT_CHANGED": (
        "A checkpointed part computed something else the second time",
        _page(
            '"A different number of tensors was saved during the original forward and recomputation".',
            "The part depends on something that has changed since: random numbers, a counter, a global, the mode.",
            "checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)",
        ),
    ),
    "MODULE_NOT_READY": (
        "A module was used before it was made",
        _page(
            '"cannot assign module before Module.__init__() call".',
            "`super().__init__()` is missing, or stands after the first layer.",
            "def __init__(self):\n    super().__init__()            # first\n    self.layer = nn.Linear(4, 4)",
        ),
    ),
    "UNCLASSIFIED": (
        "The script ended with an error of its own",
        _page(
            "An exception that is none of torch's known ones.",
            "The traceback tells more than the doctor can.",
            "# look at the line of your own code that is last in the traceback",
            "Where the script is meant to end so.",
        ),
    ),
    "SPARSE_GRADIENT": (
        "An optimizer was given sparse gradients, which it can't use",
        _page(
            '"Adam does not support sparse gradients".',
            "An embedding with `sparse=True` has a gradient of only the rows that were looked up; the averages of Adam "
            "and its relatives are of all rows.",
            "nn.Embedding(rows, size)                                  # without sparse=True\n"
            "sparse = torch.optim.SparseAdam(embedding.parameters())   # or an optimizer of its own",
        ),
    ),
    "DISTRIBUTION_PARAMETER": (
        "A distribution was given a parameter that it can't have",
        _page(
            '"Expected parameter scale ... to satisfy the constraint GreaterThan(lower_bound=0.0)", and its like.',
            "A linear layer gives any number, also negative ones, and after some steps it does. A scale is above 0, a "
            "probability between 0 and 1.",
            "scale = torch.nn.functional.softplus(self.scale(h)) + 1e-5\n"
            "policy = Normal(self.mean(h), scale)\n"
            "choice = Categorical(logits=self.scores(h))               # logits may be any numbers",
        ),
    ),
}
