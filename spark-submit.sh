#!/bin/sh
# Submit one of our jobs: what goes before the job's path is for spark-submit, what comes after it for the job.
#
#   ./spark-submit.sh --master spark://host:7077 jobs/redelivery_tracker.py --config conf/local.toml orders
#
# The connector's jars come from the lock file (checked by sha256, cached). On a cluster that reaches a full Maven mirror,
# KMQ_PACKAGES=1 takes the ordinary coordinates instead; a --packages or --jars of your own replaces both.
# To executors that are other processes (any master but local, local[…]) this package is sent as a zip, with --py-files.
# They need numpy, pandas, pyarrow and protobuf, and PYSPARK_PYTHON is the path of their interpreter; where the driver's
# is another one, name it in PYSPARK_DRIVER_PYTHON. More: docs/deployment.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYSPARK_DRIVER_PYTHON:-${PYSPARK_PYTHON:-$here/.venv/bin/python}}
if ! [ -x "$python" ] && ! command -v "$python" >/dev/null 2>&1; then
    echo "spark-submit.sh: no Python at $python: run 'make setup', or set PYSPARK_PYTHON" >&2
    exit 2
fi
# Workers must run the interpreter that has pyarrow.
export PYSPARK_PYTHON="${PYSPARK_PYTHON:-$python}" PYSPARK_DRIVER_PYTHON="$python"
# This checkout goes before another one that is installed.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

# What was said before the job's path.
master=local own_jars='' before='' jars=''
for argument in "$@"; do
    case $before in
        --master) master=$argument ;;
        --conf | -c) case $argument in spark.master=*) master=${argument#*=} ;; esac ;;
    esac
    case $argument in
        --packages | --packages=* | --jars | --jars=*) own_jars=1 ;;
        --master=*) master=${argument#*=} ;;
        *.py) case $before in --py-files | --files) ;; *) break ;; esac ;;
    esac
    before=$argument
done

submit=$("$python" -c 'import os, pyspark; print(os.path.join(os.path.dirname(pyspark.__file__), "bin", "spark-submit"))')
if [ "$own_jars" ]; then
    :
elif [ "${KMQ_PACKAGES:-}" = 1 ]; then
    set -- --packages "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0,io.delta:delta-spark_4.2_2.13:4.4.0,com.globalmentor:hadoop-bare-naked-local-fs:0.1.0" "$@"
else
    jars=$("$python" -m kmq_spark.local.jars paths spark)
    set -- --jars "$(printf '%s' "$jars" | tr '\n' ',')" "$@"
fi
# What spark-defaults.conf says of a setting that is given here.
conf=${SPARK_CONF_DIR:-${SPARK_HOME:+$SPARK_HOME/conf}}
said() {
    sed -n "s/^[[:space:]]*$1[[:space:]=:]\{1,\}//p" "${conf:-/nowhere}/spark-defaults.conf" 2>/dev/null | tail -n 1
}
java_options="$(said 'spark\.driver\.defaultJavaOptions') $(said 'spark\.driver\.extraJavaOptions')"
# Java refuses two garbage collectors.
case "${JAVA_TOOL_OPTIONS:-} ${JDK_JAVA_OPTIONS:-} ${SPARK_SUBMIT_OPTS:-} $java_options $*" in
    *-XX:+Use*GC*) collector='' ;;
    *) collector=-XX:+UseSerialGC ;;
esac
quick=''
case $master in
    local | 'local['*)
        # Faster than TCP.
        set -- --conf spark.python.unix.domain.socket.enabled=true "$@"
        # PySpark's own daemon prints a traceback for each worker whose query stops. Executors have only PySpark's.
        set -- --conf spark.python.daemon.module=kmq_spark.spark.python_daemon "$@"
        # Java's first compiler only: it starts sooner. On a cluster the driver has processors enough for the second one.
        quick='-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m'
        ;;
    *)
        archive=$("$python" -m kmq_spark.local.archive)
        # First, so that a --py-files of your own goes before it.
        set -- --py-files "$archive" "$@"
        ;;
esac
# -Xss16m: stopping a query during foreachBatch otherwise overflows the stack of a regex in Spark's log formatter.
# As the default options, so that your own --driver-java-options and those of spark-defaults.conf come after them.
log=$(printf '%s' "$here" | sed 's/ /%20/g')/kmq_spark/spark/log4j2.properties
memory=${KMQ_DRIVER_MEMORY:-$(said 'spark\.driver\.memory')}
redacted=$(said 'spark\.redaction\.regex')
default_options=$(said 'spark\.driver\.defaultJavaOptions')
# A socket's path has 107 characters at most; java.io.tmpdir may be longer, above all on a cluster.
exec "$submit" \
    --deploy-mode client \
    --conf spark.api.mode=classic \
    --driver-memory "${memory:-2g}" \
    --conf spark.driver.defaultJavaOptions="-Xss16m $collector $quick -Dlog4j2.configurationFile=file://$log $default_options" \
    --conf spark.python.unix.domain.socket.dir=/tmp \
    --conf spark.ui.showConsoleProgress=false \
    --conf spark.ui.enabled="${KMQ_SPARK_UI:-false}" \
    --conf spark.kafka.consumer.cache.capacity=4096 \
    --conf "spark.redaction.regex=(?i)secret|password|token|access[.]?key|kafka[.](sasl|ssl)|jaas|private.?key${redacted:+|$redacted}" \
    "$@"
