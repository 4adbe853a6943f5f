"""An MCP server in a process of its own: over stdio, or over streamable HTTP on a port of loopback."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


@server.tool()
def note(text: str) -> str:
    """Remembers a text and tells all it remembers."""
    notes.append(text)
    return f"{os.getpid()}: {', '.join(notes)}"


@server.tool()
def divide(a: float, b: float) -> str:
    """Divides."""
    return str(a / b)


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
async def hang() -> str:
    """Holds the whole server."""
    time.sleep(60)
    return "never"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
