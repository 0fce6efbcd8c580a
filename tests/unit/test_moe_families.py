"""The reader of vLLM's model files, on files made up."""

from ep_a2a.commands.plan.families import Family
from tools.moe_families import families_of

MODEL_FILE = """
from vllm.model_executor.layers import FusedMoEFactory
class Layer:
    def __init__(self, config, width, shares=False):
        self.width = config.latent if config.latent is not None else width
        self.shares = shares
        kinds = dict(top_k=getattr(config, "k", 2))
        self.experts = FusedMoEFactory(
            config.inner.experts, hidden_size=self.width, is_sequence_parallel=self.shares, **kinds
        )
class Shared:
    def __init__(self, config, parallel):
        self.mlp = Layer(config, config.wide, shares=parallel.use_sequence_parallel_moe)
class Copied:
    def __init__(self, config):
        self.mlp = Layer(config, width=config.wide)
"""


def test_model_files_say_which_keys_count(tmp_path):
    models = tmp_path / "model_executor" / "models"
    models.mkdir(parents=True)
    registered = '"MixtralForCausalLM": ("new", "Shared"), "NewForCausalLM": ("new", "Copied")'
    (models / "registry.py").write_text(f"MODELS = {{{registered}}}")
    (models / "new.py").write_text(MODEL_FILE)
    shared = Family(("latent", "wide"), ("inner.experts",), ("k",), shares_tokens=True)
    copied = Family(shared.hidden, shared.experts, shared.topk)
    assert families_of(tmp_path) == {shared: ["MixtralForCausalLM"], copied: ["NewForCausalLM"]}
