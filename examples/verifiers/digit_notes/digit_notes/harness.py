"""Harness that shows the model one part of the task per turn, and of the turns before only the notes."""

from __future__ import annotations

import ssl
from functools import cache

import httpx
import verifiers.v1 as vf

from digit_notes.notes import notes_of, parts_of


class NotesConfig(vf.HarnessConfig):
    """Options of the harness."""


class NotesHarness(vf.Harness[NotesConfig]):
    """Harness whose every request is a conversation of its own: one message with the notes and the next digits.

    The loop runs in the process of verifiers, because it executes nothing that the model writes.
    """

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play all turns. A refused request ends the episode with status 1, as a program would end."""
        notes = reply = ""
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None, verify=_certificates()) as client:
            for part in parts_of(data.digits):
                messages = [{"role": "user", "content": f"{notes}{part}="}]
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                reply = answer.json()["choices"][0]["message"]["content"] or ""
                notes = notes_of(reply)
        return vf.ProgramResult(exit_code=0, stdout=reply, stderr="")


@cache
def _certificates() -> ssl.SSLContext:
    """Load the certificates once, which takes longer than an episode."""
    return ssl.create_default_context()
