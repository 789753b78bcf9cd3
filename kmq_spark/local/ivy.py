"""
Resolve Maven coordinates with the Ivy library in the pyspark package.

Rule 1: run in a separate process (`python -m kmq_spark.local.ivy DIR COORDINATES`), so that its JVM ends with it.
Rule 2: fetch exactly the given coordinates without dependencies; the lock file lists the dependencies too.
Rule 3: no repository address in this file. Spark has a default one and reads `DEFAULT_ARTIFACT_REPOSITORY`.

Source: Spark `DependencyUtils.resolveMavenDependencies`, what `spark-submit --packages` runs.
"""

from __future__ import annotations

import sys

from pyspark.java_gateway import launch_gateway

_ARGUMENTS = 2


def main(arguments: list[str]) -> int:
    """
    Fetch jars into `<ivy_dir>/jars`, one file for each coordinate, named `<group>_<artifact>-<version>.jar`.

    Args:
        arguments: Directory for Ivy, and coordinates `group:artifact:version` separated by commas.

    Returns:
        Exit code: 0 if all jars were fetched, 2 for wrong arguments.
    """
    if len(arguments) != _ARGUMENTS:
        sys.stderr.write("usage: python -m kmq_spark.local.ivy IVY_DIR COORDINATE,…\n")
        return 2
    ivy_dir, coordinates = arguments
    gateway = launch_gateway()  # type: ignore[no-untyped-call]  # pyspark leaves it untyped
    try:
        jvm = gateway.jvm
        no_settings_file = jvm.scala.Option.empty()
        resolve = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies
        transitive, exclusions, more_repositories = False, "", ""
        resolve(transitive, exclusions, coordinates, more_repositories, ivy_dir, no_settings_file)
    finally:
        gateway.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
