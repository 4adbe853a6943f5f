"""An MCP server written by hand, JSON-RPC lines over stdio: it answers what the SDK's own server would not."""

import json
import sys

RESULTS = {
    "megabytes": {"content": [{"type": "text", "text": "ä" * 1_000_000}]},
    "hologram": {"content": [{"type": "hologram", "beams": 3}]},
    "picture": {"content": [{"type": "image", "data": "aaaa", "mimeType": "image/png"}, {"type": "text", "text": "a"}]},
    "link": {"content": [{"type": "resource_link", "uri": "file:///notes.txt", "name": "notes"}]},
    "structured": {"content": [], "structuredContent": {"sum": 3}},
    "nothing": {"content": []},
    "refuses": {"content": [{"type": "text", "text": "no such file"}], "isError": True},
}
REQUESTS = {
    "samples": ("sampling/createMessage", {"messages": [], "maxTokens": 8}),
    "elicits": ("elicitation/create", {"message": "who?", "requestedSchema": {"type": "object", "properties": {}}}),
}


def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def called(tool):
    """The result of a call; the client's answer where the tool asks it for something."""
    if tool == "leaves":
        sys.exit(0)
    if tool == "babbles":
        print("this is no JSON", flush=True)
        return {"content": [{"type": "text", "text": "after all"}]}
    if tool in REQUESTS:
        method, params = REQUESTS[tool]
        say(id="mine", method=method, params=params)
        answer = next(one for one in map(json.loads, sys.stdin) if one.get("id") == "mine")
        return {"content": [{"type": "text", "text": json.dumps(answer.get("error"))}], "isError": "error" in answer}
    return RESULTS[tool]


def main():
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in (*RESULTS, *REQUESTS, "leaves", "babbles")]
    for request in map(json.loads, sys.stdin):
        if "id" not in request:
            continue
        match request["method"]:
            case "initialize":
                version = request["params"]["protocolVersion"]
                about = {"protocolVersion": version, "capabilities": {"tools": {}}}
                say(id=request["id"], result={**about, "serverInfo": {"name": "by hand", "version": "1"}})
            case "tools/list":
                say(id=request["id"], result={"tools": tools})
            case "tools/call":
                say(id=request["id"], result=called(request["params"]["name"]))
            case other:
                say(id=request["id"], error={"code": -32601, "message": f"there is no {other}"})


main()
