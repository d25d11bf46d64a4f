"Package metadata; everything that nbdev also needs is read from settings.ini"
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
cfg = ConfigParser()
cfg.read(here/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
extras = {name[:-len('_requirements')]: cfg[name].split() for name in cfg if name.endswith('_requirements')}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], url=cfg['git_url'], license='Apache-2.0',
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=[*find_packages(include=['repq', 'repq.*']), 'repq.experiments'],   # with the notebooks that it executes
    package_dir={'repq.experiments': 'nbs/experiments'},
    package_data={'repq.experiments': ['*.ipynb'], 'repq.fast': ['*.c']},
    python_requires=f'>={cfg["min_python"]}',
    install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'nbdev': [f'{cfg["lib_name"]}=repq._modidx:d'], 'console_scripts': ['repq=repq.cli.command:main']},
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research',
                 'License :: OSI Approved :: Apache Software License', 'Programming Language :: Python :: 3'],
)
