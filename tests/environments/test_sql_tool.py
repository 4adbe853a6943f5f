"""The SQL tool: queries on a real file, and statements that must not succeed."""

import asyncio
import hashlib
import sqlite3
import time

import pytest

from environments.sql_tool import SqlSettings, SqlTool


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("sql") / "it's a shop?.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL, picture BLOB);"
            "CREATE VIRTUAL TABLE notes USING fts5(text); INSERT INTO notes VALUES ('a red apple');"
        )
        items = [(f"item {number}", number / 2, bytes(500)) for number in range(1000)]
        connection.executemany("INSERT INTO items (name, price, picture) VALUES (?, ?, ?)", items)
        connection.execute("INSERT INTO items (name) VALUES (?)", ("long " * 1000,))
    connection.close()
    return path


@pytest.fixture(scope="module")
def sql(database):
    tool = SqlTool(SqlSettings(database=str(database), timeout_s=0.5, memory_mb=64))
    yield tool
    tool.close()


def ask(sql, *queries):
    tool = sql.tool()

    async def main():
        return [await tool.run({"query": query}) for query in queries]

    results = asyncio.run(main())
    return results[0] if len(queries) == 1 else results


def test_it_answers(sql):
    found = ask(sql, "SELECT id, name, price, picture FROM items WHERE price <= 0.5 OR price IS NULL")
    rows = found.text.split("\n")
    assert rows[0] == "id,name,price,picture"
    assert rows[1].startswith("1,item 0,0.0,x'000000")
    assert rows[1].endswith("'… (500 bytes)")
    assert rows[3].startswith("1001,long long")
    assert rows[3].endswith("… (5000 characters),NULL,NULL")
    assert found.counts == {"tool_calls": 1}
    assert ask(sql, "SELECT * FROM items WHERE 0").text == "id,name,price,picture\n(no rows)"
    assert ask(sql, "SELECT id FROM items").text.endswith("\n50\n(only the first 50 rows)")
    assert ask(sql, "PRAGMA table_info(notes)").text.endswith("0,text,,0,NULL,0")
    assert "a red apple" in ask(sql, "SELECT * FROM notes WHERE notes MATCH 'apple'").text
    assert ask(sql, "SELECT value * 2 FROM json_each('[1,2]')").text.endswith("\n2\n4")
    many = ask(sql, "SELECT " + ", ".join(["hex(zeroblob(50)) AS a"] * 10) + " FROM items")
    assert many.text.endswith("\n(only the first 4 rows)")
    assert len(many.text) <= 4096


REFUSED = [
    "INSERT INTO items (name) VALUES ('x')",
    "UPDATE items SET name = 'x'",
    "DELETE FROM items",
    "DROP TABLE items",
    "CREATE TABLE more (a)",
    "CREATE TEMP TABLE more (a)",
    "ALTER TABLE items ADD COLUMN more",
    "INSERT INTO notes VALUES ('x')",
    "WITH one(a) AS (SELECT 1) INSERT INTO items (name) SELECT a FROM one",
    "UPDATE sqlite_master SET sql = ''",
    "PRAGMA writable_schema = 1",
    "PRAGMA query_only = 0",
    "PRAGMA journal_mode = WAL",
    "PRAGMA hard_heap_limit = 1",
    "PRAGMA temp_store_directory = '/tmp'",
    "SELECT * FROM pragma_database_list",
    "PRAGMA database_list",
    "ATTACH '/etc/passwd' AS other",
    "ATTACH ':memory:' AS other",
    "VACUUM",
    "VACUUM INTO '{folder}/copy.db'",
    "BEGIN IMMEDIATE",
    "SELECT load_extension('libc.so.6')",
    "SELECT fts3_tokenizer('simple', x'4141414141414141')",
    "SELECT readfile('/etc/passwd')",
    "SELECT 1; DELETE FROM items",
    "REINDEX",
    "ANALYZE",
    "SELECT zeroblob(1000000000)",
    "SELECT group_concat(picture) FROM items a, items b, items c",
    "SELECT replace(hex(zeroblob(400000)), '0', hex(zeroblob(400000)))",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT '" + "x" * (1 << 17) + "'",
    "",
    "no SQL",
    "SELECT '\ud800'",
]


@pytest.mark.parametrize("query", REFUSED, ids=range(len(REFUSED)))
def test_it_only_reads(sql, database, query):
    before = hashlib.sha256(database.read_bytes()).digest()
    refused, good = ask(sql, query.format(folder=database.parent), "SELECT count(*) FROM items")
    assert refused.counts == {"tool_calls": 1, "refused_calls": 1}, refused
    assert refused.text.startswith("error: ")
    assert good.text == "count(*)\n1001"
    assert hashlib.sha256(database.read_bytes()).digest() == before
    assert [path.name for path in database.parent.iterdir()] == [database.name]


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r",
        "SELECT count(*) FROM items a, items b, items c, items d",
        # One call of one function, in which SQLite does not look at the clock.
        "SELECT instr(hex(zeroblob(500000)), hex(zeroblob(250000)) || 1)",
    ],
)
def test_a_query_ends_at_its_limit(sql, query):
    began = time.monotonic()
    slow, good = ask(sql, query, "SELECT 1")
    assert slow.text == "error: it ran for longer than 0.5 s"
    assert slow.counts == {"tool_calls": 1, "refused_calls": 1}
    assert good.text == "1\n1"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE r(x) AS (SELECT zeroblob(900000) UNION ALL SELECT x FROM r) SELECT x FROM r ORDER BY random()",
        "WITH RECURSIVE r(x) AS (SELECT 0 UNION SELECT randomblob(900000) FROM r) SELECT count(*) FROM r",
        "SELECT " + ", ".join(["zeroblob(1000000)"] * 200),
    ],
)
def test_a_query_keeps_to_its_memory(database, query):
    sql = SqlTool(SqlSettings(database=str(database), timeout_s=20.0, memory_mb=64))
    try:
        large, good = ask(sql, query, "SELECT 1")
    finally:
        sql.close()
    assert large.counts == {"tool_calls": 1, "refused_calls": 1}
    assert large.text in ("error: it needed more than 64 MiB", "error: string or blob too big")
    assert good.text == "1\n1"


def test_a_call_that_is_given_up_frees_its_place(database):
    sql = SqlTool(SqlSettings(database=str(database), timeout_s=30.0, slots=1))
    tool = sql.tool()

    async def main():
        endless = {"query": "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r"}
        task = asyncio.create_task(tool.run(endless))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait((task,))
        return await asyncio.gather(*(tool.run({"query": "SELECT 1"}) for _ in range(5)))

    try:
        assert {one.text for one in asyncio.run(asyncio.wait_for(main(), 10))} == {"1\n1"}
        assert sql._pool.started == 2
        sql._pool._idle[0].process.kill()
        sql._pool._idle[0].process.wait()
        assert ask(sql, "SELECT 1").text == "1\n1"
    finally:
        sql.close()


def test_settings_and_files_that_cannot_be_used_are_refused(tmp_path, database):
    with pytest.raises(ValueError, match=r"sql\.database must name an SQLite file"):
        SqlSettings()
    with pytest.raises(ValueError, match=r"sql\.memory_mb must lie between"):
        SqlSettings(database="x", memory_mb=1)
    with pytest.raises(ValueError, match=r"must name a readable file, found 'nowhere\.db'"):
        SqlTool(SqlSettings(database="nowhere.db"))
    (tmp_path / "text.db").write_text("no database")
    with pytest.raises(ValueError, match="which is none"):
        SqlTool(SqlSettings(database=str(tmp_path / "text.db")))
    path = tmp_path / "wal.db"
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("CREATE TABLE t (a)")
    with pytest.raises(ValueError, match=r"found wal\.db-wal beside"):
        SqlTool(SqlSettings(database=str(path)))
    writer.close()
