"""Parity with transformers and peft on the tiny folders of fixtures/families, computed live: `make parity`.

Two environments take part, since the project needs no torch and torch no project:

    python -m tests.policy.parity ours FOLDER          # the project's: writes logits, and adapters as the learner does
    python -m tests.policy.parity reference FOLDER     # requirements-reference.txt: computes the same, prints a table

The exit status of the second is 1 if any logit differs by more than TOLERANCE. With `--keep` it copies the adapters
that it compared into the fixtures (adapter_headrace), with the logits that peft gives: tests hold the writer to these
bytes.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

FAMILIES = Path(__file__).parent / "fixtures" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
KEPT = ("llama3", "gemma2", "gemma3_multimodal")
TOLERANCE = 1e-4
WRITTEN = "adapters/1.1"
"""Where `AdapterStore` puts version 1.1."""


def ours(folder: Path) -> None:
    """Write `folder`/NAME/ours.safetensors (logits by what was adapted) and the adapter that was written here."""
    import jax
    from safetensors.numpy import load_file, save_file

    from policy.adapters import AdapterStore, load_peft
    from policy.lora import LoraSettings, init_adapter
    from policy.transformer import hidden_states, stack_layers, unembed, visible
    from policy.weights import ModelSettings, load_model
    from trajectories.schema import Version
    from trajectories.storage import open_storage

    for name in NAMES:
        model = load_model(ModelSettings(path=str(FAMILIES / name)))
        config, params = model.config, stack_layers(model.params)
        tokens = load_file(FAMILIES / name / "expected.safetensors")["tokens"]
        segments = np.ones_like(tokens)
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

        def logits(adapter, scale, config=config, params=params, tokens=tokens, positions=positions, segments=segments):
            mask = visible(segments, np.zeros_like(segments))
            hidden = jax.jit(hidden_states, static_argnums=0)(config, params, adapter, scale, tokens, positions, mask)
            return np.asarray(unembed(config, params, hidden))

        lora = LoraSettings(rank=4, alpha=12.0)
        generator = np.random.default_rng(list(name.encode()))
        adapter = init_adapter(config, lora, seed=1)
        for parts in adapter.values():
            parts["b"] = generator.standard_normal(parts["b"].shape, np.float32) * np.float32(0.15)
        out = folder / name
        store = AdapterStore(open_storage(str(out)), config, lora, base_model=f"tiny/{name}")
        store.publish(Version(1, 1), adapter, step_ended_at=0.0)
        found = {"base": logits(None, 1.0), "written": logits(adapter, lora.scale)}
        for path in sorted((FAMILIES / name).glob("adapter_*")):
            read, settings = load_peft(open_storage(str(path)), config)
            found[path.name] = logits(read, settings.scale)
        save_file(found, out / "ours.safetensors")


def reference(folder: Path, keep: bool) -> int:
    """Compare `folder`, which `ours` wrote, with what transformers and peft compute."""
    import torch
    import transformers
    from peft import PeftModel
    from safetensors.numpy import load_file, save_file

    from tests.policy.make_family_fixtures import logits_of

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def base(name: str) -> torch.nn.Module:
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(FAMILIES / name, dtype=torch.float32, attn_implementation="eager")
        return model.eval()

    print(f"{'max |Δlogit|':<20} {'base':>10} {'ours in peft':>14}   peft's, read here")
    worst = 0.0
    for name in NAMES:
        mine = load_file(folder / name / "ours.safetensors")
        tokens = load_file(FAMILIES / name / "expected.safetensors")["tokens"]
        plain = logits_of(base(name), tokens)
        differences = {"base": np.abs(mine["base"] - plain).max()}
        written = logits_of(PeftModel.from_pretrained(base(name), folder / name / WRITTEN).eval(), tokens)
        differences["written"] = np.abs(mine["written"] - written).max()
        if np.abs(written - plain).max() < 0.1:
            raise SystemExit(f"{name}: peft loaded nothing of the adapter that was written here")
        for key in sorted(mine.keys() - differences.keys()):
            adapted = PeftModel.from_pretrained(base(name), FAMILIES / name / key).eval()
            differences[key] = np.abs(mine[key] - logits_of(adapted, tokens)).max()
        rest = ", ".join(f"{key} {differences[key]:.1e}" for key in sorted(differences) if key.startswith("adapter_"))
        print(f"{name:<20} {differences['base']:>10.1e} {differences['written']:>14.1e}   {rest}")
        worst = max(worst, *differences.values())
        if keep and name in KEPT:
            kept = FAMILIES / name / "adapter_headrace"
            kept.mkdir(exist_ok=True)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copyfile(folder / name / WRITTEN / file, kept / file)
            save_file({"logits": written}, kept / "expected.safetensors")
    print(f"worst {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(not worst <= TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "reference"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true", help="put the compared adapters into the fixtures")
    arguments = parser.parse_args()
    if arguments.side == "ours":
        ours(arguments.folder)
        return 0
    return reference(arguments.folder, arguments.keep)


if __name__ == "__main__":
    sys.exit(main())
