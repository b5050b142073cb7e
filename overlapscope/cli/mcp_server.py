"""The MCP server behind ``overlapscope mcp``, by the official SDK: tools in, text and structured content out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

from overlapscope import __version__
from overlapscope.cli.mcp_tools import INSTRUCTIONS, TOOLS, Recordings, Tool
from overlapscope.errors import OverlapScopeError, make_printable

_log = logging.getLogger(__name__)


def build_server(folders: Sequence[Path]) -> Server[Any]:
    """Build a server of the recordings in some folders."""
    recordings, tools = Recordings(folders), {tool.name: tool for tool in TOOLS}
    one_at_a_time = anyio.CapacityLimiter(1)  # two large recordings may not fit into memory

    async def list_tools(_context: object, _parameters: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_describe(tool) for tool in TOOLS])

    async def call_tool(_context: object, call: types.CallToolRequestParams) -> types.CallToolResult:
        tool = tools.get(call.name)
        if tool is None:
            return _fail(f"{call.name}: no such tool; there are {', '.join(tools)}")
        answer = partial(_answer, tool, recordings, call.arguments or {})
        return await anyio.to_thread.run_sync(answer, limiter=one_at_a_time)

    return Server(
        "overlapscope",
        version=__version__,
        title="OverlapScope",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve(folders: Sequence[Path]) -> None:
    """Serve on stdin and stdout until the client hangs up. What else is printed goes to stderr."""

    async def run() -> None:
        server = build_server(folders)
        async with stdio_server() as (requests, responses):
            await server.run(requests, responses, server.create_initialization_options())

    anyio.run(run)


def _answer(tool: Tool, recordings: Recordings, arguments: dict[str, Any]) -> types.CallToolResult:
    try:
        answer = tool.call(recordings, arguments)
    except OverlapScopeError as error:
        return _fail(str(error))
    except Exception as error:
        _log.exception("%s failed", tool.name)
        return _fail(f"{tool.name} failed with {type(error).__name__}: an error of ours; the server's log has more")
    # The same once more as text: not every client hands structured content to its model.
    texts = answer.text, json.dumps(answer.content, separators=(",", ":"))
    return types.CallToolResult(content=[_text(text) for text in texts], structured_content=answer.content)


def _describe(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input,
        output_schema=tool.output,
        annotations=types.ToolAnnotations(
            title=tool.title, read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )


def _fail(message: str) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(make_printable(message))], is_error=True)


def _text(text: str) -> types.TextContent:
    return types.TextContent(type="text", text=text)
