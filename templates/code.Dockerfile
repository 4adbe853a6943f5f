# The rollouts image with what your own folder (code.path) requires, so that workers need not install it at their start.
# The folder itself travels with each launch and is not in the image. In that folder:
#     docker build -f HEADRACE/templates/code.Dockerfile --build-arg IMAGE=$IMAGE -t $IMAGE-mine .
ARG IMAGE
FROM ${IMAGE}
COPY requirements*.txt pyproject*.toml /opt/headrace/code/
RUN python -m environments.user_code /opt/headrace/code
