"""The search tool over real corpora, good and bad."""

import asyncio
import json

import pytest

from environments.search_tool import SearchSettings, SearchTool, Tokenizer

DOCUMENTS = [
    {"id": "moon", "title": "The Moon", "text": "The moon orbits the earth. " + "Tides follow it. " * 100},
    {"id": 7, "title": "Cats", "text": "Cats are running\nafter mice."},
    {"text": "A recipe for apple pie: apples, flour, butter. " + "Stir well. " * 50 + "Cardamom helps at the end."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return path


def ask(search, *queries):
    tool = search.tool()

    async def main():
        return await asyncio.gather(*(tool.run({"query": query}) for query in queries))

    try:
        results = asyncio.run(main())
    finally:
        search.close()
    return results[0] if len(queries) == 1 else results


def test_the_best_documents_come_first_with_what_was_found(corpus):
    search = SearchTool(SearchSettings(corpus=str(corpus), results=2, snippet_chars=60))
    moon, cats, cardamom, nothing, many = ask(
        search, "the earth's moon?", "a cat runs", "cardamom", "zebra", " ".join(["apple", "moon", "cats"] * 1000)
    )
    lines = moon.text.split("\n")
    assert lines[0] == "1. [moon] The Moon"
    assert lines[1].startswith("The moon orbits the earth.")
    assert all(len(line) <= 62 for line in lines)
    assert cats.text == "1. [7] Cats\nCats are running after mice.\n" + cats.text.partition("mice.\n")[2]
    assert cardamom.text.startswith("1. [corpus.jsonl:3]\n…")
    assert "Cardamom helps at the end." in cardamom.text
    assert nothing.text == "nothing was found"
    assert many.text.count("[") == 2
    assert {tuple(result.counts.items()) for result in (moon, cats, cardamom, nothing)} == {(("tool_calls", 1),)}


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "NEAR(",
        "title:moon",
        "moon*",
        "' OR 1=1 --",
        "moon) OR (",
        "^moon",
        "\x00moon",
        "NOT",
        "\ud800moon",
        "-moon",
    ],
)
def test_the_query_language_is_not_the_policys(corpus, query):
    result = ask(SearchTool(SearchSettings(corpus=str(corpus))), query)
    assert set(result.counts) <= {"tool_calls", "refused_calls"}, result
    if "moon" in query:
        assert "[moon]" in result.text


def test_bad_lines_are_left_out_and_counted(tmp_path, corpus):
    good = [json.dumps({"text": f"document number {number}"}) for number in range(100)]
    bad = ["{", "[]", '{"text": 1}', '{"text": "\\ud800"}', "[" * 100_000, '{"text": "' + "x" * (5 << 20) + '"}']
    corpus.write_bytes("\n".join([*good, *bad]).encode() + b'\n{"text": "\xff"}')
    search = SearchTool(SearchSettings(corpus=str(tmp_path)))
    search.prepare()
    assert (search.corpus.documents, search.corpus.left_out) == (100, 7)
    assert search.corpus.why.startswith("line 101 of corpus.jsonl: JSONDecodeError")
    assert "[corpus.jsonl:43]" in ask(search, "42").text


def test_a_corpus_of_no_documents_is_refused_before_the_policy_says_anything(tmp_path, corpus):
    with pytest.raises(ValueError, match=r"search\.corpus must name a file or a folder that is there"):
        SearchTool(SearchSettings(corpus=str(tmp_path / "nowhere")))
    corpus.write_text("[]\n" * 3)
    with pytest.raises(ValueError, match=r"found 0 in .* and 3 lines that are none; the first: line 1"):
        SearchTool(SearchSettings(corpus=str(corpus)))
    corpus.write_text('{"text": "one"}\n' + "[]\n" * 3)
    search = SearchTool(SearchSettings(corpus=str(corpus)))
    with pytest.raises(ValueError, match=r"found 1 in .* and 3 lines that are none; the first: line 2"):
        search.prepare()
    with pytest.raises(ValueError, match="found 1 in"):
        search.tool()
    search.close()
    with pytest.raises(ValueError, match=r"search\.tokenizer must be one of porter unicode61"):
        SearchSettings(corpus="x", tokenizer="words")


def test_the_index_is_bounded(corpus):
    corpus.write_text("".join(json.dumps({"text": f"{n} " * 3000}) + "\n" for n in range(200)))
    search = SearchTool(SearchSettings(corpus=str(corpus), index_mb=1))
    with pytest.raises(ValueError, match=r"search\.index_mb must hold the corpus: 1 MiB were full"):
        search.prepare()
    search.close()


def test_text_files_by_paragraph_and_scripts_without_spaces(tmp_path):
    (tmp_path / "a.md").write_text("# Title\nfirst line\n\n\nsecond paragraph about 東京都庁舎\n")
    (tmp_path / "b.txt").write_bytes(b"broken \xff bytes")
    (tmp_path / "c.bin").write_bytes(b"second")
    search = SearchTool(SearchSettings(corpus=str(tmp_path), tokenizer=Tokenizer.TRIGRAMS))
    tokyo, broken = ask(search, "東京都", "broken")
    assert tokyo.text.startswith("1. [a.md:5]\nsecond paragraph")
    assert broken.text.startswith("1. [b.txt:1]\nbroken")
