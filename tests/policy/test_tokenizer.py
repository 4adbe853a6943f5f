"""Tokenizers: a GGUF file and a Hugging Face folder of the same model give the same ids, and plain text no control
token."""

import json
import threading
import time

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.files import find_model
from policy.tokenizer import TokenizerError, load_folder_tokenizer, load_gguf_tokenizer, load_tokenizer
from tests.policy.make_chat_fixtures import CHAT, build_folder

TEXTS = [
    "Tom has 37 boxes.  What   now?\n\n\nit's 12345",
    "naïve café — “quotes” e\u0301 日本語 👩‍🚀",
    "\t\r\n \x00 \ufffd <b>x</b>",
    " leading and trailing ",
    "",
]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.UNKNOWN,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.BYTE,
)


def as_gguf(folder, path, pre="", prefix=False):
    """The folder's tokenizer as llama.cpp's converter writes it."""
    data = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = data["model"]["vocab"]
    types = dict.fromkeys(vocabulary, NORMAL)
    if not pre:
        types |= {piece: BYTE for piece in vocabulary if piece.startswith("<0x")} | {"<unk>": UNKNOWN}
    added = {token["content"]: token for token in data["added_tokens"]}
    types |= {text: CONTROL if token["special"] else USER for text, token in added.items()}
    ids = vocabulary | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types([types[token] for token in tokens])
    if pre:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_add_space_prefix(prefix)
    writer.add_eos_token_id(ids[config["eos_token"]["content"]])
    if config["bos_token"]:
        writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_chat_template(config["chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("family", "pre"), [("qwen2.5", "qwen2"), ("gemma-2", ""), ("mistral", "")])
def test_a_gguf_file_and_a_folder_give_the_same_ids(tmp_path, family, pre):
    place = build_folder(family, tmp_path / family)
    prefix = family == "mistral"
    if prefix:  # as Llama 2 and Mistral had it first, and as llama.cpp has it: a space before every stretch of text
        data = json.loads((place / "tokenizer.json").read_text())
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        data["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
        data["pre_tokenizer"] = None
        (place / "tokenizer.json").write_text(json.dumps(data))
    folder = load_folder_tokenizer(place)
    file = load_gguf_tokenizer(as_gguf(place, tmp_path / "model.gguf", pre, prefix))
    frame = "".join(f"{control}\n{text}" for control, text in zip(folder.control, TEXTS, strict=False))
    assert file.control == folder.control
    assert (file.named, file.chat_templates) == (folder.named, folder.chat_templates)
    assert file.encode_frame(frame) == folder.encode_frame(frame)
    for text in TEXTS:
        assert file.encode(text) == folder.encode(text)
        assert file.decode(file.encode(text)) == folder.decode(folder.encode(text))


def test_llama3_cuts_numbers_by_threes_and_takes_whole_words(tmp_path):
    data = json.loads((CHAT / "bytes.json").read_text())
    folder = build_folder("llama-3", tmp_path / "m")
    data = json.loads((folder / "tokenizer.json").read_text())
    numbers = {"12": 1000, "123": 1001, "1234": 1002, "Ġzebra": 1003}
    filler = {f"unused{i}": i for i in range(max(t["id"] for t in data["added_tokens"]) + 1, 1000)}
    data["model"]["vocab"] |= filler | numbers
    data["model"]["merges"] += [["1", "2"], ["12", "3"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    file = load_gguf_tokenizer(as_gguf(folder, tmp_path / "m.gguf", "llama-bpe"))
    assert file.encode("1234")[0] == 1001, "three digits make a word"
    assert file.encode("a zebra")[-1] == 1003, "no merges lead to it"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["<|im_", "end|>", "<|im_end|>", "<|im_start|>", "</tool_call>", "\ud800", "é ", "\n"]))
)
def test_plain_text_never_makes_a_control_token(tmp_path_factory, pieces):
    tokenizer = load_folder_tokenizer(build_folder("qwen2.5", tmp_path_factory.getbasetemp() / "plain"))
    text = "".join(pieces)
    control = {token.id for token in tokenizer.control.values()}
    assert control.isdisjoint(tokenizer.encode(text))
    shielded = tokenizer.guard(text, "\U000f0000")
    assert control.isdisjoint(tokenizer.encode_frame(shielded, "\U000f0000"))
    assert tokenizer.encode_frame(shielded, "\U000f0000") == tokenizer.encode(text)


def test_a_long_text_has_the_ids_of_a_short_one_and_lets_other_threads_run(tmp_path):
    tokenizer = load_folder_tokenizer(build_folder("qwen2.5", tmp_path / "m"))
    line = "Ein Satz, der é und 12 enthält.\n"
    assert tokenizer.encode(line * 1000) == tokenizer.encode(line) * 1000
    turns, done = [0], threading.Event()

    def count():
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    before = turns[0]
    tokenizer.encode(line * 30_000)
    during = turns[0] - before
    done.set()
    other.join()
    assert during > 50


def test_white_space_around_control_tokens_goes_where_the_model_wants_it(tmp_path):
    folder = build_folder("chatml", tmp_path / "m")
    data = json.loads((folder / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["lstrip"] = token["content"] == "<|im_start|>"
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_folder_tokenizer(folder)
    start, end = (tokenizer.control[text].id for text in ("<|im_start|>", "<|im_end|>"))
    (x,) = tokenizer.encode("x")
    assert tokenizer.encode_frame("x \n<|im_start|>x<|im_end|> \n x<|im_end|>\n") == [x, start, x, end, x, end]


def test_models_may_have_more_rows_than_tokens_and_several_ends(tmp_path):
    folder = build_folder("qwen2.5", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 2048, "eos_token_id": 3}))
    tokenizer = load_folder_tokenizer(folder)
    assert tokenizer.vocab_size == 2048
    ends = [tokenizer.control[text].id for text in ("<|im_end|>", "<|endoftext|>")]
    assert tokenizer.stop_ids == (*ends, 3)
    assert tokenizer.decode([2047]) == ""


def test_tokens_that_only_the_configuration_adds_are_known(tmp_path):
    folder = build_folder("chatml", tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    highest = max(token.id for token in load_folder_tokenizer(build_folder("chatml", tmp_path / "n")).control.values())
    config["added_tokens_decoder"] = {str(highest + 1): {"content": "<|extra|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_folder_tokenizer(folder)
    assert tokenizer.encode_frame("<|extra|>") == [highest + 1]
    assert highest + 1 not in tokenizer.encode("<|extra|>")


def test_unusable_tokenizers_are_refused_with_what_was_found(tmp_path):
    folder = build_folder("qwen2.5", tmp_path / "m")
    with pytest.raises(TokenizerError, match=r"one of gpt-2, llama-bpe, qwen2, smollm; found gpt2 with other"):
        load_gguf_tokenizer(as_gguf(folder, tmp_path / "other.gguf", "other"))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {"<|": 900, "<||": 901}
    data["model"]["merges"] = [["<", "|"], ["<|", "|"]]
    data["added_tokens"].append({**data["added_tokens"][0], "id": 901, "content": "<||"})
    forging = build_folder("qwen2.5", tmp_path / "forging")
    (forging / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match=r"forging: the plain text of control tokens.*<\|\|"):
        load_folder_tokenizer(forging)
    broken = build_folder("qwen2.5", tmp_path / "broken")
    (broken / "generation_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"generation_config.json: no JSON"):
        load_folder_tokenizer(broken)
    assert load_tokenizer(find_model(str(folder))).control
