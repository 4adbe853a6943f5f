"""An MCP server over stdio with one tool; `mcp_server.toml` starts one for each episode."""

import re

from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def calculator(expression: str) -> str:
    """Applies one operation, + - or *, to two numbers."""
    parts = re.fullmatch(r"(\d{1,5})([-+*])(\d{1,5})", expression)
    if not parts:
        raise ValueError("an expression is one operation on two numbers")
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


if __name__ == "__main__":
    server.run("stdio")
