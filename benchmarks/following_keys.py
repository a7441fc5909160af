"""A study: which keys of a prompt its projections should follow. Paths are those of one machine; see docs/history.md."""
import sys, time, json, copy, statistics, types
sys.path.insert(0,'benchmarks')
import torch, numpy as np
torch.set_num_threads(1)
from dataclasses import replace
import bpc_calib.calibration.needs as nd; nd.TOKENS=int(__import__('os').environ.get('FORCED','64'))
import forced_pass
from forced_pass import Way, TOKENS, divergences
import bpc_artifacts
from bpc_artifacts import ProjectionArtifact
from bpc_calib import enable
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpora
from bpc_calib.text.samples import draw_samples
from bpc_calib.method.rules import Rules, shares_of
from bpc_calib.method.fitting import mean_key, _sums, RIDGE, refine
from bpc_calib.method.metric import score_metric, second_moment
from bpc_calib.backends.dispatch import find
from bpc_calib.runtime.online_fit import spread, observed_places, fit_online, Asked
from bpc_calib.models.observation import observing
from bpc_calib.compat import with_cache
from transformers import DynamicCache
name,length,count=sys.argv[1],int(sys.argv[2]),int(sys.argv[3])
only=set(sys.argv[4].split(',')) if len(sys.argv)>4 else None
S='build/real/'
art=bpc_artifacts.load(f'{S}{name}-bpc.safetensors')
model=load_model(S+name); enable(model); tok=load_tokenizer(S+name)
corpora=open_corpora([f'prose={S}text/held-out/prose',f'code={S}text/held-out/code'])
texts,_=draw_samples(corpora,tok,vocab_size=model.config.vocab_size,samples=count,sequence_length=length,seed=0)
layers=list(art.layers)
def rules(shares,b=0.02):
    return {l:Rules(b,min_tokens=1,shares=(shares or {}).get(l)) for l in layers}
by_head=shares_of(art,layers)
HALF=len(sys.argv)>5
if HALF:
    h=length//2; texts=[torch.cat([texts[i][:h],texts[(i+1)%len(texts)][-h:]]) for i in range(len(texts))]
def prefill(ids):
    ids=ids.unsqueeze(0).to(torch.int64)
    cache=DynamicCache(config=model.config); asked={}
    def attend(module,query,key,value,arguments):
        if module.layer_idx in art.layers:
            p=observed_places(query.shape[2]//2 if HALF else query.shape[2])
            asked[module.layer_idx]=Asked(query[:,:,p].clone(),p)
        return None
    with observing(model,attend), torch.inference_mode():
        model.base_model(input_ids=ids[:,:-TOKENS],**with_cache(cache))
    return {l:cache.layers[l].keys[0][:,:len(ids[0])//2 if HALF else None] for l in layers}, asked

from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.codes import unpack_codes
from bpc_calib.method.fitting import Products
def ls(keys,P,M,mean,rounds,prior=0.0):
    k=(keys.double()-mean.double().unsqueeze(-2)); k32=k.float()
    kern=find(k32[None])
    norm=((k@M.double())*k).sum(-2).sum(-1)
    def products(P):
        cb32=make_codebook(P[None],torch.float32,metric=M[None])
        codes=kern.encode_with(cb32,k32[None]).codes[0]
        u=unpack_codes(codes,P.shape[-2]).float()
        sq=(u.mT@u).double()+prior*torch.eye(P.shape[-2]).double(); cr=u.mT.double()@k+prior*P0
        return Products(sq,cr,norm+prior*((P0@M.double())*P0).sum((-1,-2)),make_codebook(P,torch.float64,metric=M))
    P0=P.double()
    return refine(products,P,rounds)[0]
def on(K,l,L,q,n,iters=4,rounds=2,metric=None):
    some=K[:,spread(K.shape[1],n)]; m=mean_key(some)
    M=score_metric(second_moment(q)) if metric is None else metric
    f=find(some[None]).fit(some[None],L.bits,iterations=iters,rounds=rounds,metric=M[None],mean=m[None],generator=torch.Generator().manual_seed(0))
    return f.projection[0],m,M
def variants(keys,asked):
    out={}; tm={}
    def want(n): return n in only
    for l in layers:
        L=art.layers[l]; K=keys[l].float()
        P,M,mu=(torch.as_tensor(np.asarray(x)) for x in (L.projection,L.metric,L.mean))
        m=mean_key(K)
        q=asked[l].queries.unflatten(1,(K.shape[0],-1)).flatten(2,3)[0].float()
        own=score_metric(second_moment(q))
        for n in only:
            b=time.time()
            some=lambda c: K[:,spread(K.shape[1],c)]
            if n=='followed':
                from bpc_calib.runtime.online_fit import followed
                from bpc_calib.method.codebook import codebook_of
                bk=followed(codebook_of(L,slice(None),keys[l].dtype,keys[l].device,own[None]),keys[l][None],None)
                r=(bk.projection[0].float(),bk.mean[0].float(),bk.metric[0].float())
            elif n=='mean': r=(P,m,M)
            elif n=='mean+own': r=(P,m,own)
            elif n=='own0': r=(P,mu,own)
            elif n=='mix0': r=(P,mu,(own+M)/2)
            elif n=='mean+mix': r=(P,m,(own+M)/2)
            elif n=='half+own': r=(P,(m+mu)/2,own)
            elif n=='half+mix': r=(P,(m+mu)/2,(own+M)/2)
            elif n=='online': r=on(K,l,L,q,1024)
            elif n=='online-512': r=on(K,l,L,q,512)
            elif n=='online-4k': r=on(K,l,L,q,4096)
            elif n=='online-4k-r6': r=on(K,l,L,q,4096,4,6)
            elif n=='online-mix': r=on(K,l,L,q,1024,metric=(own+M)/2)
            elif n.startswith('own'):   # own-rounds-keys[-prior]
                p=n.split('-'); r=(ls(some(int(p[2])),P,own,m,int(p[1]),float(p[3]) if len(p)>3 else 0.),m,own)
            elif n[0]=='p' and n[1].isdigit():   # p50-rounds-keys
                from bpc_calib.method.metric import query_metric
                p=n.split('-'); mm=query_metric(second_moment(q),int(p[0][1:])/100,0.75); r=(ls(some(int(p[2])),P,mm,m,int(p[1]),float(p[3]) if len(p)>3 else 0.),m,mm)
            elif n.startswith('new'):
                p=n.split('-'); w=torch.ones(asked[l].places.shape[0]); w[-64:]=float(p[3])
                qq=asked[l].queries.unflatten(1,(K.shape[0],-1))*w[:,None].sqrt(); mm=score_metric(second_moment(qq.flatten(2,3)[0].float())); r=(ls(some(int(p[2])),P,mm,m,int(p[1])),m,mm)
            elif n.startswith('mul'):   # log-spaced places, mul-keys-prior
                p=n.split('-'); c=int(p[1]); N=K.shape[1]
                u=(torch.arange(c)+.5)/c; pl=((128*((N+128)/128)**u)-128).long().clamp(0,N-1); pl[0]=0
                mx=(own+M)/2; r=(ls(K[:,pl],P,mx,mu,1,float(p[2])),mu,mx)
            elif n.startswith('muh'):   # half log-spaced, half even
                p=n.split('-'); c=int(p[1])//2; N=K.shape[1]
                u=(torch.arange(c)+.5)/c; pl=((128*((N+128)/128)**u)-128).long().clamp(0,N-1); pl[0]=0
                mx=(own+M)/2; r=(ls(torch.cat([K[:,pl],some(c)],1),P,mx,mu,1,float(p[2])),mu,mx)
            elif n.startswith('mun'):   # newest keys
                p=n.split('-'); c=int(p[1]); mx=(own+M)/2; r=(ls(K[:,-c:],P,mx,mu,1,float(p[2])),mu,mx)
            elif n.startswith('muz'):   # evenly spaced and the first 16
                p=n.split('-'); c=int(p[1]); mx=(own+M)/2; r=(ls(torch.cat([K[:,:16].repeat(1,4,1),some(c)],1),P,mx,mu,1,float(p[2])),mu,mx)
            elif n.startswith('mup'):
                p=n.split('-'); mx=(own+M)/2; r=(ls(some(int(p[2])),P,mx,mu,int(p[1]),float(p[3])),mu,mx)
            elif n.startswith('mix'):
                p=n.split('-'); mx=(own+M)/2; r=(ls(some(int(p[2])),P,mx,m,int(p[1]),float(p[3]) if len(p)>3 else 0.),m,mx)
            tm[n]=tm.get(n,0)+time.time()-b
            out.setdefault(n,{})[l]=replace(L,projection=r[0].numpy(),mean=r[1].numpy(),metric=r[2].numpy())
    print({n:round(x,2) for n,x in tm.items()})
    return {n:ProjectionArtifact(x,art.metadata) for n,x in out.items()}
allf={}
for i,t in enumerate(texts):
    b=time.time()
    keys,asked=prefill(t)
    v=variants(keys,asked)
    cases={'exact-equal-old':Way(None,True,rules(None)),'exact':Way(None,False,rules(by_head)),'cal':Way(art,False,rules(by_head))}
    cases|={n:Way(a,False,rules(by_head)) for n,a in v.items()}
    f=divergences(model,t,cases)
    for k,x in f.items(): allf.setdefault(k,[]).append(x)
    print(i,len(t),f"{time.time()-b:.0f}s",{k:round(x,4) for k,x in f.items()},flush=True)
for k,x in allf.items(): print(f'{k:20s} {statistics.mean(x):.4f}')

base=statistics.mean(allf['exact-equal-old'])
for k,x in allf.items():
    print(f"{k:18s} {statistics.mean(x):.4f}  over exact-equal-old {statistics.mean(x)/base:.3f}  over mix0 {statistics.mean(x)/statistics.mean(allf['mix0']):.3f} wins {sum(a<b for a,b in zip(x,allf['mix0']))}/{len(x)}")
json.dump(allf,open(f'build/follow-{name}-{length}{"-half"*HALF}.json','w'))
