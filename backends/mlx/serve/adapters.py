"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which have the form of vLLM's endpoints."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ..llm import BusyError
from .errors import ERRORS, field_error, request_error
from .parts import RequestPart
from .route import Route
from .service import Service


class LoadRequest(RequestPart):
    """`lora_path` is a folder on the machine of the server.

    - `load_inplace`: an adapter of this name may exist, and is replaced.
    - `model`: the model that gets the adapter. It may be left out if only one model of the server takes adapters.
    """

    lora_name: str = Field(min_length=1)
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadRequest(RequestPart):
    """`lora_int_id`, a number of vLLM's own, has no effect."""

    lora_name: str
    lora_int_id: int | None = None


def adapter_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=Route, responses=ERRORS)
    models = service.models

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(body: LoadRequest, request: Request) -> Response:
        service.check_fields(request, body)
        if body.lora_name in models.names and not (body.load_inplace and body.lora_name in models.adapters):
            raise field_error("lora_name", f"the name {body.lora_name!r} is taken already")
        try:
            await models.load_adapter(body.lora_name, body.lora_path, body.model)
        except FileNotFoundError as error:
            raise field_error("lora_path", str(error), status=404) from error
        except (BusyError, ValueError, RuntimeError, OSError) as error:
            raise request_error(error, "lora_path", {"adapter": "lora_path"}) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(body: UnloadRequest, request: Request) -> Response:
        service.check_fields(request, body)
        if body.lora_name not in models.adapters:
            problem = f"the adapter {body.lora_name[:100]!r} does not exist"
            raise field_error("lora_name", problem, status=404, code="model_not_found")
        await models.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
