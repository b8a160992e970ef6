"""The routes of files: `/v1/files`, `/v1/batches` and `/v1/audio`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from .batches import Batches, BatchRequest
from .errors import ERRORS
from .route import Route
from .service import Service
from .speech import FIELDS, ServedSpeech, SpeechRequest, transcript, transcript_events
from .streaming import ServerSentEvents
from .uploads import Form


def file_routes(service: Service, batches: Batches) -> APIRouter:
    router = APIRouter(route_class=Route, responses=ERRORS)
    files = service.files

    @router.post("/v1/files")
    async def add_file(request: Request) -> dict[str, Any]:
        form = await Form.of(request)
        given = form.file("file")
        added = await asyncio.to_thread(files.add, given.filename, form.text("purpose", "batch"), given.data)
        return files.describe(added.object["id"])

    @router.get("/v1/files")
    async def list_files(request: Request) -> dict[str, Any]:
        return files.describe_all(request.query_params)

    @router.get("/v1/files/{id}")
    async def get_file(id: str) -> dict[str, Any]:
        return files.describe(id)

    @router.get("/v1/files/{id}/content")
    async def get_content(id: str) -> Response:
        return FileResponse(files.get(id).path, media_type="application/octet-stream")

    @router.delete("/v1/files/{id}")
    async def delete_file(id: str) -> dict[str, Any]:
        files.remove(id)
        return {"id": id, "object": "file", "deleted": True}

    @router.post("/v1/batches")
    async def start_batch(body: BatchRequest, request: Request) -> dict[str, Any]:
        service.check_fields(request, body)
        return batches.start(body)

    @router.get("/v1/batches")
    async def list_batches() -> dict[str, Any]:
        return batches.describe_all()

    @router.get("/v1/batches/{id}")
    async def get_batch(id: str) -> dict[str, Any]:
        return batches.get(id).object

    @router.post("/v1/batches/{id}/cancel")
    async def cancel_batch(id: str) -> dict[str, Any]:
        return await batches.cancel(id)

    @router.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await _transcript(service, request, "transcribe")

    @router.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await _transcript(service, request, "translate")

    return router


async def _transcript(service: Service, request: Request, task: str) -> Response:
    form = await Form.of(request)
    service.check_names(request, sorted(form.names() - FIELDS))
    form.file("file")
    given = SpeechRequest.of(form, task)
    model = await service.models.acquire(form.text("model") or None, ServedSpeech)
    release = partial(service.models.release, model)
    if given.is_streamed:
        events = await transcript_events(model, form, given, release)
        return StreamingResponse(events, media_type=ServerSentEvents.media_type)
    try:
        content, media_type = await asyncio.to_thread(transcript, model, form, given)
    finally:
        release()
    if isinstance(content, str):
        return Response(content, media_type=media_type)
    return JSONResponse(content)
