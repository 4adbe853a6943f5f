"""A server that speaks OpenEnv's protocol over WebSocket by hand, and answers a step as its action says."""

import json
import sys
import time

from websockets.sync.server import serve


def reply(**data):
    return json.dumps({"type": "observation", "data": data})


HEARD = {"text": "heard"}
ANSWERS = {
    "text": "no JSON {",
    "list": "[1, 2]",
    "null": "null",
    "binary": b"\xff\xfe\x00",
    "empty": "{}",
    "deep": "[" * 200_000,
    "nothing": reply(),
    "other": json.dumps({"type": "state", "data": {"step_count": 3}}),
    "refused": json.dumps({"type": "error", "data": {"message": "no such move", "code": "EXECUTION_ERROR"}}),
    "word": reply(observation="heard", reward=0.0, done=False),
    "fields": reply(observation={"words": "heard"}, reward=0.0, done=False),
    "nan": reply(observation=HEARD, reward=float("nan"), done=True),
    "infinite": reply(observation=HEARD, reward=float("inf"), done=True),
    "reward": reply(observation=HEARD, reward="much", done=True),
    "done": reply(observation=HEARD, reward=1.0, done="no"),
    "huge": reply(observation={"text": "x" * 17_000_000}, reward=0.0, done=False),
    "long": reply(observation={"text": "x" * 3_000_000}, reward=0.0, done=False),
    "won": reply(observation={}, reward=1, done=True),
}


def talk(connection):
    for message in map(json.loads, connection):
        if message["type"] == "reset":
            connection.send(reply(observation=HEARD, reward=None, done=False))
        if message["type"] == "close":
            return
        action = message["data"].get("message", "")
        if action == "hang":
            time.sleep(60)
        elif action == "leave":
            connection.close(1011, "out of memory")
        elif action == "idle":
            connection.send(reply(observation=HEARD, reward=0.5, done=False))
            return
        elif action:
            connection.send(ANSWERS[action])


with serve(talk, "127.0.0.1", int(sys.argv[1])) as server:
    server.serve_forever()
