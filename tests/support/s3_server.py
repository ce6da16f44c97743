"""A real S3 server (moto's), on the loopback interface or on a simulated host, for tests of mirrors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.support.two_hosts import Host

BUCKET = "bucket"
SECRET = "secret-access-key-of-the-tests"


@contextlib.contextmanager
def s3_server(host: Host | None = None) -> Iterator[dict[str, str]]:
    """Start a server with the bucket BUCKET, and yield the environment variables with which a process uses it."""
    from moto.server import ThreadedMotoServer  # here, as boto3: otherwise all processes of the tests import them

    server = ThreadedMotoServer(ip_address=host.address if host else "127.0.0.1", port=0, verbose=False)

    def start() -> None:
        server.start()  # in a thread, which is in the network of the thread that starts it
        client_of(variables_of(server)).create_bucket(Bucket=BUCKET)

    host.at_home(start) if host else start()
    try:
        yield variables_of(server)
    finally:
        server.stop()


def variables_of(server: Any) -> dict[str, str]:
    address, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://{address}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    return variables | {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def client_of(variables: dict[str, str]) -> Any:
    """Return boto3's client of a server."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        region_name=variables["AWS_DEFAULT_REGION"],
        aws_access_key_id="key",
        aws_secret_access_key=SECRET,
    )
