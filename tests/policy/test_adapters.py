"""Adapters in storage: whole or absent, checked before use, and never put in force by an incarnation of the past."""

import hashlib
import json
import threading
import uuid

import numpy as np
import pytest
from safetensors.numpy import load, save

from policy.adapters import (
    AdapterStore,
    BadAdapter,
    Fenced,
    Lease,
    MissingAdapter,
    claim_incarnation,
    load_peft,
)
from policy.lora import LoraSettings, init_adapter
from policy.transformer import ModelConfig
from tests.gcs import fake_gcs
from trajectories.schema import Version
from trajectories.storage import FolderStorage, PreconditionFailed, open_storage

CONFIG = ModelConfig(vocab_size=19, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24)
LORA = LoraSettings(rank=4, alpha=8.0)


def trained(seed, lora=LORA):
    generator = np.random.default_rng(seed)
    adapter = init_adapter(CONFIG, lora, seed)
    for parts in adapter.values():
        parts["b"] = generator.standard_normal(parts["b"].shape).astype(np.float32)
    return adapter


def assert_same(left, right):
    assert left.keys() == right.keys()
    for target in left:
        for part in ("a", "b"):
            np.testing.assert_array_equal(left[target][part], right[target][part])
            assert right[target][part].dtype == np.float32


@pytest.fixture(params=["folder", "gs"])
def storage(request, tmp_path):
    if request.param == "folder":
        yield open_storage(str(tmp_path / "run"))
        return
    with fake_gcs("headrace-adapters"):
        yield open_storage(f"gs://headrace-adapters/{uuid.uuid4()}")


@pytest.fixture
def folder(tmp_path):
    return open_storage(str(tmp_path / "run"))


def store(storage, lora=LORA, **options):
    return AdapterStore(storage, CONFIG, lora, base_model="HuggingFaceTB/SmolLM2-135M-Instruct", **options)


def test_what_is_published_is_what_is_read(storage):
    writer, reader = store(storage, clock=lambda: 1234.5), store(storage)
    assert reader.latest() is None
    adapter = trained(1)
    published = writer.publish(Version(3, 1), adapter, step_ended_at=1234.25)
    latest = reader.latest()
    assert latest == published
    assert (latest.version, latest.published_at, latest.step_ended_at) == (Version(3, 1), 1234.5, 1234.25)
    assert_same(adapter, reader.load(latest.version, sha256=latest.sha256))
    writer.publish(Version(4, 1), trained(2), step_ended_at=0.0)
    assert reader.latest().version == Version(4, 1)
    assert_same(trained(2), reader.load(Version(4, 1)))
    assert_same(adapter, reader.load(Version(3, 1)))
    assert reader.versions() == [Version(3, 1), Version(4, 1)]


def test_the_files_are_peft_s(folder):
    """Names, orientation and config as in a PEFT checkpoint of a Hugging Face Llama."""
    adapter = trained(1)
    store(folder).publish(Version(3, 1), adapter, step_ended_at=0.0)
    tensors = load(folder.read("adapters/3.1/adapter_model.safetensors"))
    assert len(tensors) == 2 * 7 * 2
    up = tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    np.testing.assert_array_equal(up, adapter["up_proj"]["a"][1].T)
    key = tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
    np.testing.assert_array_equal(key, adapter["k_proj"]["b"][0].T)
    assert key.shape == (8, 4)
    config = json.loads(folder.read("adapters/3.1/adapter_config.json"))
    expected = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(LORA.targets),
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": False,
        "bias": "none",
        "inference_mode": True,
    }
    assert config.items() >= expected.items()


def test_a_peft_folder_is_read_without_a_manifest(folder):
    lora = LoraSettings(rank=2, alpha=5.0, targets=("q_proj", "v_proj"))
    store(folder, lora).publish(Version(0, 1), trained(1, lora), step_ended_at=0.0)
    folder.delete("adapters/0.1/manifest.json")
    adapter, settings = load_peft(folder.join("adapters/0.1"), CONFIG)
    assert settings == lora
    assert_same(trained(1, lora), adapter)
    with pytest.raises(MissingAdapter, match="lacks adapter_config"):
        load_peft(folder, CONFIG)


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_rslora", True), ("peft_type", "IA3"), ("rank_pattern", {"q_proj": 2}), ("target_modules", "lm_head")],
)
def test_adapters_of_another_kind_are_refused(folder, field, value):
    store(folder).publish(Version(0, 1), trained(1), step_ended_at=0.0)
    config = json.loads(folder.read("adapters/0.1/adapter_config.json")) | {field: value}
    folder.write("adapters/0.1/adapter_config.json", json.dumps(config).encode())
    with pytest.raises(BadAdapter, match=field):
        load_peft(folder.join("adapters/0.1"), CONFIG)


def rewrite(storage, change):
    """Change the weights and make manifest and checksums agree again, as a broken writer would."""
    weights = load(storage.read("adapters/1.1/adapter_model.safetensors"))
    change(weights)
    data = save(weights)
    storage.write("adapters/1.1/adapter_model.safetensors", data)
    manifest = json.loads(storage.read("adapters/1.1/manifest.json"))
    manifest["files"]["adapter_model.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    storage.write("adapters/1.1/manifest.json", json.dumps(manifest).encode())


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w: w[NAME].__setitem__((0, 0), np.nan), f"{NAME} has values that are not finite"),
        (lambda w: w.update({NAME: w[NAME].T.copy()}), f"{NAME} has shape [16, 4], expected [4, 16]"),
        (lambda w: w.update({NAME: np.zeros((4, 16), np.int32)}), f"{NAME} has dtype int32"),
        (lambda w: w.pop(NAME), f"missing {NAME}"),
        (lambda w: w.update({"lm_head.lora_A.weight": np.zeros(3)}), "unexpected lm_head.lora_A.weight"),
    ],
    ids=["nan", "shape", "dtype", "missing", "unexpected"],
)
def test_wrong_weights_are_never_used(folder, change, found):
    store(folder).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    rewrite(folder, change)
    with pytest.raises(BadAdapter) as caught:
        store(folder).load(Version(1, 1))
    assert found in str(caught.value)
    assert "adapter 1.1" in str(caught.value)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:-2] + bytes([d[-2] ^ 1]) + d[-1:], lambda d: b""])
def test_tampered_bytes_are_refused(storage, name, damage):
    store(storage).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    path = f"adapters/1.1/{name}"
    storage.write(path, damage(storage.read(path)))
    with pytest.raises(BadAdapter, match=f"{name} is not what its manifest says"):
        store(storage).load(Version(1, 1))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "version": "x"}'])
def test_unreadable_pointers_are_named(folder, data):
    store(folder).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    for name, read in (
        ("latest.json", lambda: store(folder).latest()),
        ("adapters/1.1/manifest.json", lambda: store(folder).load(Version(1, 1))),
    ):
        folder.write(name, data)
        with pytest.raises(BadAdapter, match=name.rpartition("/")[2]):
            read()


def test_an_absent_adapter_is_told_from_a_bad_one(folder):
    with pytest.raises(MissingAdapter, match=r"adapter 9\.9 lacks manifest\.json"):
        store(folder).load(Version(9, 9))


def test_weights_other_than_those_that_latest_names_are_refused(folder):
    store(folder).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    with pytest.raises(BadAdapter, match="not those that latest"):
        store(folder).load(Version(1, 1), sha256="0" * 64)


def test_a_run_with_other_settings_refuses_the_adapter(folder):
    store(folder).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    with pytest.raises(BadAdapter, match=r"trained with rank 4, alpha 8\.0 .* this run uses rank 4, alpha 16\.0"):
        store(folder, LoraSettings(rank=4, alpha=16.0)).load(Version(1, 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_published(folder, value):
    good, bad = store(folder), trained(2)
    good.publish(Version(1, 1), trained(1), step_ended_at=0.0)
    bad["v_proj"]["b"][1, 0, 0] = value
    with pytest.raises(BadAdapter, match=r"v_proj\.b of layer 1"):
        good.publish(Version(2, 1), bad, step_ended_at=0.0)
    assert good.latest().version == Version(1, 1)
    assert good.versions() == [Version(1, 1)]


def test_wrong_shapes_are_never_published(folder):
    adapter = trained(1)
    del adapter["o_proj"]
    with pytest.raises(BadAdapter, match="expected"):
        store(folder).publish(Version(1, 1), adapter, step_ended_at=0.0)
    assert store(folder).latest() is None


def test_a_version_never_changes(folder):
    writer = store(folder)
    writer.publish(Version(1, 1), trained(1), step_ended_at=0.0)
    writer.publish(Version(1, 1), trained(1), step_ended_at=0.0)  # a retry
    with pytest.raises(BadAdapter, match="versions never change"):
        writer.publish(Version(1, 1), trained(2), step_ended_at=0.0)
    assert_same(trained(1), store(folder).load(Version(1, 1)))


def test_each_racer_claims_its_own_incarnation(storage):
    claimed = []
    barrier = threading.Barrier(8)

    def race():
        barrier.wait()
        claimed.append(claim_incarnation(storage))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))
    assert [Lease(storage, n).still_mine() for n in (7, 8)] == [False, True]


def test_an_old_incarnation_never_overwrites_a_newer_one(storage):
    old, new = store(storage), store(storage)
    old.publish(Version(10, 1), trained(1), step_ended_at=0.0)
    new.publish(Version(5, 2), trained(2), step_ended_at=0.0)  # restored from an older checkpoint: a smaller step wins
    with pytest.raises(Fenced, match=r"incarnation 2 has published 5\.2"):
        old.publish(Version(11, 1), trained(3), step_ended_at=0.0)
    with pytest.raises(Fenced):
        store(storage).publish(Version(11, 1), trained(3), step_ended_at=0.0)
    assert store(storage).latest().version == Version(5, 2)
    new.publish(Version(6, 2), trained(4), step_ended_at=0.0)
    assert store(storage).latest().version == Version(6, 2)


def test_a_claimed_lease_fences_before_the_newer_one_has_published(folder):
    first = claim_incarnation(folder)
    old = store(folder)
    old.publish(Version(1, first), trained(1), step_ended_at=0.0)
    second = claim_incarnation(folder)
    with pytest.raises(Fenced, match=f"incarnation {second} has claimed"):
        old.publish(Version(2, first), trained(2), step_ended_at=0.0)
    store(folder).publish(Version(1, second), trained(1), step_ended_at=0.0)
    assert store(folder).latest().version == Version(1, second)


class LostReplies(FolderStorage):
    """A network that loses the reply of every conditional write, after which the client library tries again: the write
    has happened, and the writer is told that its precondition failed."""

    def write(self, name, data, *, if_generation=None):
        generation = super().write(name, data, if_generation=if_generation)
        if if_generation is not None:
            raise PreconditionFailed("the object has the generation of your own first try")
        return generation

    def join(self, prefix):
        return LostReplies(self._root / prefix)


def test_a_write_whose_reply_was_lost_counts(tmp_path):
    lossy = LostReplies(tmp_path)
    assert [claim_incarnation(lossy), claim_incarnation(lossy)] == [1, 2]
    writer = store(lossy)
    for step in (1, 2):
        writer.publish(Version(step, 2), trained(step), step_ended_at=0.0)
        assert store(lossy).latest().version == Version(step, 2)


def test_a_reader_that_races_the_writer_sees_whole_adapters_only(storage):
    steps, seen, faults = 25, set(), []
    done = threading.Event()

    def read():
        reader = store(storage)
        while not done.is_set() or not seen:
            latest = reader.latest()
            if latest is None or latest.version in seen:
                done.wait(0.002)
                continue
            try:
                adapter = reader.load(latest.version, sha256=latest.sha256)
            except MissingAdapter:
                continue  # pruned while it was read
            except BadAdapter as error:
                faults.append(error)
                return
            assert_same(trained(latest.version.step), adapter)
            seen.add(latest.version)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    writer = store(storage)
    for step in range(1, steps + 1):
        writer.publish(Version(step, 1), trained(step), step_ended_at=0.0)
        writer.prune(3)
    done.set()
    for thread in readers:
        thread.join()
    assert not faults
    assert len(seen) > 1
    assert writer.versions() == [Version(step, 1) for step in range(steps - 2, steps + 1)]


@pytest.mark.parametrize("whole", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"])
def test_a_crash_in_the_middle_leaves_the_last_adapter_in_force(folder, whole):
    """Die before each file in turn: readers go on with what was whole."""

    class Dying(FolderStorage):
        def write(self, name, data, *, if_generation=None):
            if name.endswith(whole):
                raise KeyboardInterrupt
            return super().write(name, data, if_generation=if_generation)

        def join(self, prefix):
            return Dying(self._root / prefix)

    store(folder).publish(Version(1, 1), trained(1), step_ended_at=0.0)
    with pytest.raises(KeyboardInterrupt):
        store(Dying(folder._root)).publish(Version(2, 1), trained(2), step_ended_at=0.0)
    reader = store(folder)
    assert reader.latest().version == Version(1, 1)
    assert reader.versions() == [Version(1, 1)]
    with pytest.raises(MissingAdapter):
        reader.load(Version(2, 1))


def test_pruning_keeps_the_newest_the_one_in_force_and_the_protected(storage):
    writer = store(storage)
    for version in (Version(7, 1), Version(8, 1), Version(2, 2), Version(3, 2)):
        writer.publish(version, trained(version.step), step_ended_at=0.0)
    storage.write("adapters/1.1/adapter_config.json", b"{}")  # a crash left it
    storage.write("adapters/notes/readme.txt", b"somebody else's")
    assert writer.prune(1, protect=[Version(7, 1)]) == [Version(1, 1), Version(8, 1), Version(2, 2)]
    assert writer.versions() == [Version(7, 1), Version(3, 2)]
    assert not storage.exists("adapters/1.1/adapter_config.json")
    assert storage.exists("adapters/notes/readme.txt")
    assert writer.prune(1) == [Version(7, 1)]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        writer.prune(0)
