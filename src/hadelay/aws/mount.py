"""Mounts the AWS endpoints: which AWS services a node serves, and at which paths."""

from hadelay.aws import scheduler, sqs
from hadelay.aws.door import Door
from hadelay.aws.signature import Signatures
from hadelay.http.routes import Routes
from hadelay.server.service.node import NodeService


def doors(service: NodeService, *, tokens: bool) -> Routes:
    """Routes of all AWS services. tokens: whether requests need a token."""
    door = Door(Signatures(service.access, required=tokens))
    sqs.mount(door)
    scheduler.mount(door)
    return door.routes
