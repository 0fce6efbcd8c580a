"""Models that know a text of this repository by heart, so that their logits have peaks.

    python -m tests.engines.vllm.trained FAMILY FOLDER

trains the shape of models.CONFIGS on a part of LICENSE, a byte per token, until it is sure of every next byte,
and writes config.json and model.safetensors. Needs transformers. Two engines whose sums differ by rounding continue
such a text with the same tokens to the end.
"""

import fcntl
import hashlib
import inspect
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.models import CONFIGS, save_config

ROOT = Path(__file__).parents[3]
CACHE = Path.home() / ".cache" / "ep_a2a" / "trained"
TEXT = b" ".join((ROOT / "LICENSE").read_bytes().split())[3392:3520]
NUM_CONTEXT = 12
"""Bytes after which this part of the text has one next byte only."""
LONGEST_PROMPT = 40
WINDOW, BATCH, MOST_STEPS, LEARNING_RATE = 64, 16, 800, 3e-3
LOSS = 0.15
"""In nats: training ends when no byte behind its context has a larger one, in any window of the text."""
STEPS_PER_LOOK = 25
TRAIN_TIMEOUT_SECS = 1200


def known_prompts(num_prompts: int, num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompts from the text that the models know, each with the tokens that follow there.

    All of it lies in a window that training has looked at. So the model, in float32, gives each of these tokens a loss
    below LOSS: it prefers it to any other by more than ln(1 / (exp(LOSS) - 1)) = 1.8 nats.
    """
    chosen, found = random.Random(0), []
    for _ in range(num_prompts):
        length = chosen.randint(NUM_CONTEXT + 1, LONGEST_PROMPT)
        assert length + num_tokens <= WINDOW
        start = chosen.randrange(len(TEXT) - WINDOW)
        end = start + length
        found.append((list(TEXT[start:end]), list(TEXT[end : end + num_tokens])))
    return found


def trained_model(python: Path, family: str) -> Path:
    """The folder of a family's model; trained once per machine, by this Python, in half a minute or so."""
    numbers = (WINDOW, BATCH, MOST_STEPS, LEARNING_RATE, LOSS, STEPS_PER_LOOK, NUM_CONTEXT)
    facts = (inspect.getsource(train), numbers, CONFIGS[family], TEXT)
    folder = CACHE / f"{family}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [str(python), "-m", "tests.engines.vllm.trained", family, str(folder)]
            subprocess.run(command, cwd=ROOT, check=True, timeout=TRAIN_TIMEOUT_SECS)
    return folder


def with_negated_experts(model: Path, folder: Path) -> Path:
    """A copy of a model whose routed experts' results have the other sign."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    for name, weight in tensors.items():
        if ".experts." in name and "down_proj" in name:
            weight.neg_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model / "config.json", folder)
    return folder


def train(config: dict[str, Any]) -> Any:
    """Returns a model of transformers that knows TEXT."""
    import transformers

    # its matrices are small, and a test beside it has the other cores
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class(**config, attn_implementation="eager")).train()
    known = torch.tensor(list(TEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=MOST_STEPS, pct_start=0.05)
    every_window = known[torch.arange(len(known) - WINDOW)[:, None] + torch.arange(WINDOW + 1)]

    def losses_of(windows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=windows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")

    for step in range(1, MOST_STEPS + 1):
        losses_of(every_window[torch.randint(len(every_window), (BATCH,))]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % STEPS_PER_LOOK == 0:
            with torch.no_grad():
                worst = losses_of(every_window)[:, NUM_CONTEXT:].max().item()
            sys.stdout.write(f"step {step}: worst loss {worst:.3f}\n")
            sys.stdout.flush()
            if worst < LOSS:
                return model
    raise AssertionError(f"a byte has a loss of {worst} after {MOST_STEPS} steps")


def main(family: str, folder: Path) -> None:
    """Trains and writes a model; the folder appears when all is there."""
    new = folder.with_suffix(".new")
    train(CONFIGS[family]).save_pretrained(new)
    save_config(new, CONFIGS[family])
    new.rename(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
