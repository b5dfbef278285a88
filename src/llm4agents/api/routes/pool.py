"""/v1/pool: machines kept ready, and what the node has room for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import Json
from llm4agents.config import PoolWish
from llm4agents.engine.engine import Engine

router = APIRouter(prefix="/v1/pool")


class Wish(models.Body):
    template: models.Name
    wanted: Annotated[int, Field(ge=0, le=limits.POOL_MAX)]
    vcpus: int | None = None
    memory_mib: int | None = None
    """None: the template's own."""


class Wishes(models.Body):
    """What is to be kept of these shapes from now on; of others nothing changes."""

    data: Annotated[list[Wish], Field(max_length=64)]


def _body(engine: Engine) -> Response:
    return Json({"data": engine.pool.describe(), "capacity": engine.admission.describe()})


@router.get("")
async def get(request: Request) -> Response:
    return _body(context.of(request).engine)


@router.put("")
async def put(body: Wishes, request: Request) -> Response:
    engine = context.of(request).engine
    engine.pool.set([PoolWish(one.template, one.wanted, one.vcpus, one.memory_mib) for one in body.data])
    return _body(engine)
