"""A real S3 server on the loopback interface (moto's), for tests of mirrors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
SECRET = "secret-access-key-of-the-tests"


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start a server with the bucket BUCKET, and yield the environment variables with which a process uses it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    client = boto3.client(
        "s3",
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        region_name=variables["AWS_DEFAULT_REGION"],
        aws_access_key_id="key",
        aws_secret_access_key=SECRET,
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield variables
    finally:
        server.stop()
